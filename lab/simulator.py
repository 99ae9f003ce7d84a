"""Claim of docs/results/simulator.md: the simulator's speed. Same as `eclip bench simulator`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_claims

if __name__ == "__main__":
    print_claims("simulator")
