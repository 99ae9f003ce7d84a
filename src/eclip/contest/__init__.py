"""Contests: the policies of a mix compared on a device."""
