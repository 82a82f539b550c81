"""Adapters on disk, in mlx-lm's own format: `adapters.safetensors` beside `adapter_config.json`."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import blocks_of
from mlxrl.policy.lora import LoRAConfig, adapters_of, check_fits

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


def adapter_parameters(model: nn.Module) -> dict[str, mx.array]:
    """The trainable parameters of the policy by their full names, e.g. `model.layers.0.self_attn.q_proj.lora_a`."""
    return dict(tree_flatten(model.trainable_parameters()))


def save_adapter(model: nn.Module, folder: str | Path, config: LoRAConfig, keys: tuple[str, ...]) -> None:
    """Write the adapter so that `mlx_lm.load(base, adapter_path=folder)` and `mlx_lm.fuse` read it.

    Args:
        model: the policy.
        folder: an existing or new folder; files of the same names are replaced.
        config: what the adapter was built with.
        keys: names of the adapted layers, as `PolicyReport.target_keys` has them.

    Raises:
        ModelError: no block of the model has an adapter, as within `adapters_disabled`. Nothing is written then.
    """
    folder, blocks = Path(folder), blocks_of(model)
    first = next((i for i, block in enumerate(blocks) if any(adapters_of(block))), None)
    if first is None:
        raise ModelError(
            f"no block of the model has an adapter to save in {folder}; leave adapters_disabled first, or attach one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / WEIGHTS), adapter_parameters(model), metadata={"format": "mlx"})
    description = {
        "fine_tune_type": _kind(config.use_dora),
        "num_layers": len(blocks) - first,  # mlx-lm adapts the last so many
        "lora_parameters": {"rank": config.rank, "scale": config.factor, "dropout": config.dropout, "keys": list(keys)},
    }
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Load an adapter of the same shape into a policy that `load_policy_with_lora` made.

    Its values become float32, in which adapters are trained: 16 bits would round most of an update away.

    Args:
        model: the policy; its adapter is replaced.
        folder: a folder with `adapters.safetensors` and `adapter_config.json`.

    Raises:
        ModelError: a file is missing or unreadable, a value is not finite, or the adapter has another kind, other
            layers, shapes or scale than the policy. The policy is then as it was.
    """
    folder = Path(folder)
    description = _read_config(folder / CONFIG)
    try:
        saved: Any = mx.load(str(folder / WEIGHTS))
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"adapter {folder / WEIGHTS} cannot be read: {error}.") from error
    here = adapter_parameters(model)
    kind, own_kind = description.get("fine_tune_type", "lora"), _kind(any(name.endswith(".m") for name in here))
    if kind != own_kind:
        raise ModelError(
            f"adapter {folder} is of the kind {kind!r}, the policy has {own_kind!r}; set use_dora to the adapter's."
        )
    check_fits(f"adapter {folder}", saved, here)
    for name, value in saved.items():
        if not mx.all(mx.isfinite(value)):
            raise ModelError(f"adapter {folder} is broken: {name} is not finite; take an earlier checkpoint.")
    scales = {module.scale for _, module in model.named_modules() if "lora_a" in module}
    if scales != {description["lora_parameters"].get("scale")}:
        raise ModelError(
            f"adapter {folder} was trained with scale {description['lora_parameters'].get('scale')}, "
            f"the policy has {sorted(scales)}; set `scale` and `rank_stabilized` to the adapter's."
        )
    model.load_weights([(name, value.astype(mx.float32)) for name, value in saved.items()], strict=False)
    mx.eval(model.trainable_parameters())


def _kind(use_dora: bool) -> str:
    """mlx-lm's word for the kind of an adapter."""
    return "dora" if use_dora else "lora"


def _read_config(path: Path) -> dict:
    try:
        description = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"adapter file {path} is missing or unreadable; name a folder that holds {CONFIG}.") from error
    except ValueError as error:  # no JSON, or no text
        raise ModelError(f"adapter file {path} is not valid JSON: {error}.") from error
    if not isinstance(description, dict) or not isinstance(description.get("lora_parameters"), dict):
        raise ModelError(f"adapter file {path} has no lora_parameters; it does not describe a LoRA adapter.")
    return description
