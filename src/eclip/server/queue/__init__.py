"""Pure functions of a queue: whether a request is accepted, and which run together."""
