"""The one place that says where MLX runs, imported before every module that needs it."""

import importlib

try:
    importlib.import_module("mlx.core")
except ImportError as error:
    raise ImportError(
        "mlxrl.algo needs MLX, which runs on Apple silicon macOS and on Linux; "
        "install mlx there (mlxrl.env and mlxrl.memory work everywhere)"
    ) from error
