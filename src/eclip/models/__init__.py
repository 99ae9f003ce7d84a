"""Models without a GPU: their kernels, their profiles, and which file a name stands for."""
