"""Claim of docs/results.md: the simulator's speed. The same as `eclip bench simulator`."""

from eclip.cli.bench import bench

if __name__ == "__main__":
    bench("simulator")
