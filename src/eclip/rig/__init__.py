"""An open device with the executables of its plans: runs, rounds, trials and arrivals."""
