"""Workers in separate processes, time-sliced or under MPS: baselines for plans."""
