"""Claim of docs/results/simulator.md: the solver's speed. The same as `eclip bench solver`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_claims

if __name__ == "__main__":
    print_claims("solver")
