"""Environments of other libraries, played as ours; each library is an extra, imported when it is asked for."""

from mlxrl.env.adapters.libraries import LIBRARIES, library_builder

__all__ = ["LIBRARIES", "library_builder"]
