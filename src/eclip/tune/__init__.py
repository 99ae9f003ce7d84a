"""Constants from measurements: placements to run, fits, calibrations, speeds."""
