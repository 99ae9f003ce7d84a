"""What eclip is about: mixes, profiles, plans, programs, the board, and the device contract.

README.md in this folder says in which order to read it. Nothing here imports another folder.
"""
