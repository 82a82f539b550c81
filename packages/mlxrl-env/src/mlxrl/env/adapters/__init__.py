"""Environments of other libraries, played as ours; each library is an extra, imported when it is asked for."""

from mlxrl.env.adapters.libraries import LIBRARIES, is_installed, library_builder, library_names

__all__ = ["LIBRARIES", "is_installed", "library_builder", "library_names"]
