"""Files: the store, comparisons, observations and checked output paths."""
