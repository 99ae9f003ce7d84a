"""Mixes, profiles, plans, programs, rules, the board, and the device contract.

This folder imports nothing of eclip but errors and jit.
"""
