"""Claim of docs/results.md: what a search's candidates cost. The same as `eclip bench search`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_claims

if __name__ == "__main__":
    print_claims("search")
