"""The ``search`` policy and everything it is made of."""
