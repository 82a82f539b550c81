"""The config.json shapes of a few models, so that a plan works without a network.

The files hold the fields that matter here, and where the figures come from under `source`.
"""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from mlxrl.memory.constants import DEFAULT_GROUP

_MODELS = ("qwen3-0.6b", "qwen3.5-9b")
_PLAIN_TAGS = {"mlx", "base", "instruct", "bf16", "dwq", "hf"}
_BITS = re.compile(r"([234568])bit")


def known_config(model_id: str) -> Mapping[str, Any] | None:
    """The config.json shape of a known model, None for any other.

    The organisation does not matter, and tags after the size are read: `mlx-community/Qwen3-0.6B-4bit`,
    `mlx-community/Qwen3.5-9B-MLX-8bit`, `Qwen/Qwen3-0.6B`. A tag such as `4bit` adds the quantization that mlx-lm's
    converter writes (groups of 64); a tag that is not understood gives None.
    """
    name = model_id.rsplit("/", 1)[-1].lower()
    model = next((m for m in _MODELS if name == m or name.startswith(m + "-")), None)
    if model is None:
        return None
    tags = [tag for tag in name.removeprefix(model).split("-") if tag and tag not in _PLAIN_TAGS]
    packed = [match for tag in tags if (match := _BITS.fullmatch(tag))]
    if len(packed) != len(tags) or len(packed) > 1:
        return None
    text = files("mlxrl.memory").joinpath("configs", f"{model}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    if packed:
        config["quantization"] = {"group_size": DEFAULT_GROUP, "bits": int(packed[0].group(1))}
    return config
