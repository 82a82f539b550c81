"""The model that all contestants load from one folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model, save_model

from mlxrl.cli import configs as configs  # gives --model embedded its meaning
from mlxrl.memory import known_config
from mlxrl.policy import LoRAConfig, PolicyReport, find_model, load_policy_with_lora
from mlxrl.policy.testing import ARCHITECTURES, character_tokenizer
from mlxrl.train import ConfigError

SHAPES = {"tiny": 32, "tiny-32k": 32, "qwen3-0.6b": 4, "hybrid-0.8b": 4, "small": 32, "small-hybrid": 32}
"""Shapes of random models, with the bits of their weights by default."""
_QWEN3 = {**ARCHITECTURES["qwen3"], "model_type": "qwen3"}
_HYBRID = {**ARCHITECTURES["qwen3_5"]["text_config"], "model_type": "qwen3_5"}
_SMALL = {"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 384, "head_dim": 32, "vocab_size": 2048}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3,
    "tiny-32k": _QWEN3 | {"vocab_size": 32_000},
    "small": _QWEN3 | _SMALL,
    "small-hybrid": _HYBRID | _SMALL | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3-0.6b": _QWEN3 | dict(known_config("qwen3-0.6b") or {}),
    "hybrid-0.8b": _HYBRID
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "head_dim": 256,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
    },
}
"""The config.json of each; a vocabulary that is not given is the tokenizer's. Hybrids have three gated-delta layers for
each with attention."""
LORA_SCALE = 2.0


@dataclass(frozen=True)
class BenchPolicy:
    """A loaded policy and where it came from."""

    folder: Path
    model: nn.Module
    tokenizer: TokenizerWrapper
    report: PolicyReport


def load_bench_policy(model: str | None, shape: str | None, bits: int | None, rank: int, folder: Path) -> BenchPolicy:
    """The model that was asked for with a fresh adapter; a random one is written to `folder` first.

    Raises:
        ConfigError: model excludes shape and bits, or one of them is unknown.
        ModelError: the model cannot be found or read.
    """
    if model is not None:
        for name, value in {"shape": shape, "bits": bits}.items():
            if value is not None:
                raise ConfigError(f"--model {model} and --{name} {value} exclude each other; give one.")
        source = find_model(model)
    else:
        source = make_random_model(folder, shape or "tiny", bits)
    return BenchPolicy(source, *load_policy_with_lora(source, LoRAConfig(rank=rank, scale=LORA_SCALE)))


def make_random_model(folder: Path, shape: str, bits: int | None = None) -> Path:
    """Write random weights of a shape, with a tokenizer of characters.

    Args:
        folder: where to.
        shape: a key of `SHAPES`.
        bits: 4 or 8 (quantized in groups of 64), 16 (bfloat16) or 32; None takes the shape's own.

    Raises:
        ConfigError: shape or bits is not one of these.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
    bits = SHAPES[shape] if bits is None else bits
    if bits not in (4, 8, 16, 32):
        raise ConfigError(f"--bits must be 4, 8, 16 or 32, got {bits}.")
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = {"vocab_size": len(tokenizer), **CONFIGS[shape], "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model, _ = load_model(folder, lazy=True, strict=False)
    mx.random.seed(0)
    values: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, _drawn(name, value)) for name, value in values]))
    model.set_dtype(mx.float32 if bits == 32 else mx.bfloat16)
    if bits < 16:
        config["quantization"] = {"group_size": 64, "bits": bits}
        nn.quantize(model, group_size=64, bits=bits)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_model(folder, model)
    return folder


def _drawn(name: str, value: mx.array) -> mx.array:
    """Matrices wide enough that the next token is far from certain and from uniform, and not the last one again."""
    if value.ndim < 2 or "conv" in name:
        return value
    return mx.random.normal(value.shape) * (1.6 if "embed" in name else 1.5) * value.shape[-1] ** -0.5
