"""What is done with devices and plans: cases, runs, searches, comparisons, calibration."""
