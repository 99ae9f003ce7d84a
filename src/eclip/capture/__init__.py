"""PyTorch modules to captures and profiles, on NVIDIA and AMD GPUs."""
