"""Which services share which GPU: scores, packing, optimum, moves, simulated days."""
