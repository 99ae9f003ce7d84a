"""Variable-output stages on NVIDIA GPUs: static buffers, counts and cursors on the device."""
