"""Claim of docs/results.md: the solver's speed. The same as `eclip bench solver`."""

from eclip.cli.bench import bench

if __name__ == "__main__":
    bench("solver")
