"""From a case to a plan: problems, policies, and searches by simulation. No device is opened."""
