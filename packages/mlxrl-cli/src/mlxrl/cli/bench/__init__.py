"""`bench`: the same work done by mlxrl, by loops a user would write and by another package, timed in one run."""

from mlxrl.cli.bench.app import bench

__all__ = ["bench"]
