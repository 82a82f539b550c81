"""The embedded default: a tiny real model in the format of mlx-lm, shipped as package data."""

from pathlib import Path

__all__ = ["embedded_model_path"]


def embedded_model_path() -> Path:
    """The folder of the embedded model and its tokenizer, as `mlx_lm.load` takes it.

    Returns:
        The folder inside the installed package. Read it; a run writes its adapters elsewhere.
    """
    return Path(__file__).parent / "model"
