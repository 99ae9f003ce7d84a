"""Searches that go on on a device, and plans that a device confirms."""
