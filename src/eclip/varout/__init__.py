"""Variable-output kernels: data-dependent lengths in static plans, never cut off."""
