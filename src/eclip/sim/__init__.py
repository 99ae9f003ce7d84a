"""The simulator: a device whose time and energy are modelled from profiles."""
