"""AMD GPUs: lanes of streams with CU masks, linear graphs, energy."""
