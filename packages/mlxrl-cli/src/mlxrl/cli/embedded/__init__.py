"""The embedded default: a tiny real model in the format of mlx-lm and the config that trains it."""

from mlxrl.cli.embedded.paths import embedded_config_path, embedded_model_path

__all__ = ["embedded_config_path", "embedded_model_path"]
