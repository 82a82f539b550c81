"""One sentence, instead of a traceback, where MLX has no wheel."""

import importlib.util

if importlib.util.find_spec("mlx") is None:
    raise ImportError(
        "mlxrl.policy needs MLX, which exists for macOS on Apple silicon and for Linux; "
        "mlxrl.env and mlxrl.memory work everywhere."
    )
