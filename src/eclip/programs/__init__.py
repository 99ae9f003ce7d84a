"""Unmodified programs: recorded, and run under libeclip."""
