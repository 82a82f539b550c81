"""The mlxrl command line."""

from mlxrl.cli.app import main

__all__ = ["main"]
