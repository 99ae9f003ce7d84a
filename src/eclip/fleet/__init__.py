"""Many GPUs: which services share which GPU, how that is scored, and simulated fleets."""
