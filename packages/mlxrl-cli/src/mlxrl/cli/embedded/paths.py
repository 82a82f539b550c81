"""Where the files of the embedded default lie inside the installed package. Read them; a run writes elsewhere."""

from pathlib import Path

FOLDER = Path(__file__).parent


def embedded_model_path() -> Path:
    """The folder of the embedded model and its tokenizer, as `mlx_lm.load` takes it."""
    return FOLDER / "model"


def embedded_config_path() -> Path:
    """The config that `mlxrl-cli train` runs when it is given none."""
    return FOLDER / "train.toml"
