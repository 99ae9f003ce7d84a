"""Policies of one mix side by side on a device: rounds, verdicts, and what they used."""
