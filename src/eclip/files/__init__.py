"""What is written to disk: the store, results, observations and checked output paths."""
