"""What every GPU device shares: sessions, the driving loop, boards in files, run logs."""
