"""The server: its processes, and changes of what they serve."""
