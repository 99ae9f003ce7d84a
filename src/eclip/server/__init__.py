"""Serving: several models on one GPU behind the Open Inference Protocol, each with its promise.

A front takes requests (HTTP, gRPC), checks and batches them; a device process per GPU runs them;
a planner process makes new plans when rates drift. ``messages.py`` is what the protocols and the
rest of a front say to each other.
"""
