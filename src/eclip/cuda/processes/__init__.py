"""Workers in processes of their own, time-sliced or under MPS: what plans are compared with."""
