"""Claim of docs/results.md: what a search's candidates cost. The same as `eclip bench search`."""

from eclip.cli.bench import bench

if __name__ == "__main__":
    bench("search")
