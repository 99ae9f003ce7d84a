"""Lanes and giving way for programs of PyTorch, without a plan."""
