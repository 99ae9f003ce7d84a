"""NVIDIA GPUs: lanes of green contexts, graphs, copies, tracing, energy."""
