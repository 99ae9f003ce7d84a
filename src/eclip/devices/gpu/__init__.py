"""What every GPU device shares: the driving loop, its steps, and how runs become logs."""
