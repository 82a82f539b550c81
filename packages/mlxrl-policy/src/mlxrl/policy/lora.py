"""LoRA on a frozen base: attach, describe, switch off."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import blocks_of

LINEAR_TYPES = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
ADAPTER_LEAVES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class LoRAConfig:
    """How the adapter is built: `y = W x + scale * B A x`, A and B of rank `rank`. Hu et al. 2021, arXiv 2106.09685.

    Args:
        rank: inner width of the two factors, at least 1.
        scale: factor of the low-rank term (alpha / rank elsewhere), above 0.
        dropout: share of the adapter's inputs dropped while a gradient is taken, in [0, 1).
        grad_checkpoint: recompute each block in the backward pass instead of keeping its activations.
        keys: block-relative names of the layers to adapt, e.g. ("self_attn.q_proj",); None takes every linear layer.
        seed: seed of the initial `lora_a` (`lora_b` starts at 0, so that the policy starts as the base).

    Raises:
        ModelError: a value is out of its range.
    """

    rank: int = 16
    scale: float = 2.0
    dropout: float = 0.0
    grad_checkpoint: bool = False
    keys: tuple[str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ModelError(f"LoRA rank must be at least 1, got {self.rank}.")
        if not 0 < self.scale < math.inf:
            raise ModelError(f"LoRA scale must be a finite number above 0, got {self.scale}.")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"LoRA dropout must be in [0, 1), got {self.dropout}.")


@dataclass(frozen=True)
class PolicyReport:
    """What was loaded and what will be trained."""

    model_type: str
    dtype: str
    num_layers: int
    target_keys: tuple[str, ...]
    adapted_per_layer: tuple[int, ...]
    trainable_leaves: tuple[str, ...]
    trainable_parameters: int
    total_parameters: int
    quantization: str
    separable_head: bool

    @property
    def adapted_layers(self) -> int:
        """Number of linear layers that carry an adapter."""
        return sum(self.adapted_per_layer)


def attach_lora(model: nn.Module, config: LoRAConfig) -> tuple[str, ...]:
    """Freeze `model` and give the linear layers of every block a LoRA adapter; only its factors stay trainable.

    Args:
        model: an mlx-lm model; changed in place.
        config: rank, scale, dropout, layer names and seed.

    Returns:
        The block-relative names of the adapted layers, sorted.

    Raises:
        ModelError: the model carries adapters already, or `config.keys` names no layer of it.
    """
    if any(name.rsplit(".", 1)[-1] in ADAPTER_LEAVES for name, _ in tree_flatten(model.parameters())):
        raise ModelError("the model already carries LoRA layers; load it again before attaching new ones.")
    found = {
        name for block in blocks_of(model) for name, module in block.named_modules() if isinstance(module, LINEAR_TYPES)
    }
    keys = found if config.keys is None else {name for name in found if name in config.keys}
    if missing := set(config.keys or ()) - found:
        raise ModelError(f"LoRA keys {sorted(missing)} name no linear layer; the blocks have {sorted(found)}.")
    mx.random.seed(config.seed)  # mlx-lm draws lora_a from the global state
    parameters = {"rank": config.rank, "scale": config.scale, "dropout": config.dropout, "keys": sorted(keys)}
    linear_to_lora_layers(model, len(blocks_of(model)), parameters)
    model.freeze()
    for _, module in adapters_of(model):
        module.unfreeze(keys=list(ADAPTER_LEAVES), recurse=False)
    model.eval()
    return tuple(sorted(keys))


def describe(model: nn.Module, *, model_type: str, keys: tuple[str, ...], separable_head: bool) -> PolicyReport:
    """The report of a model that `attach_lora` prepared."""
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    every: dict[str, Any] = dict(tree_flatten(model.parameters()))
    bits = sorted(
        {f"{m.bits}-bit" for _, m in model.named_modules() if hasattr(m, "bits") and hasattr(m, "group_size")}
    )
    dtypes = Counter(
        str(value.dtype).removeprefix("mlx.core.")
        for value in every.values()
        if mx.issubdtype(value.dtype, mx.floating)
    )
    return PolicyReport(
        model_type=model_type,
        dtype=dtypes.most_common(1)[0][0],
        num_layers=len(blocks_of(model)),
        target_keys=keys,
        adapted_per_layer=tuple(len(list(adapters_of(block))) for block in blocks_of(model)),
        trainable_leaves=tuple(sorted({name.rsplit(".", 1)[-1] for name in trainable})),
        trainable_parameters=sum(value.size for value in trainable.values()),
        total_parameters=_parameter_count(model),
        quantization=" and ".join(bits) or "none",
        separable_head=separable_head,
    )


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Within the context the model is its base: every adapter layer, of whatever class, is replaced by what it wraps.

    The adapters come back when the context ends, also after an exception.
    """
    adapters = [(name, module) for name, module in adapters_of(model)]
    if not adapters:
        yield
        return
    model.update_modules(tree_unflatten([(name, wrapped(module)) for name, module in adapters]))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten(adapters))


@contextmanager
def dropout_active(model: nn.Module) -> Iterator[None]:
    """Within the context the adapters' own dropout acts, and nothing else of the model is in training mode."""
    switches: list[Any] = [module.dropout for _, module in adapters_of(model) if "dropout" in module]
    for dropout in switches:
        dropout.train()
    try:
        yield
    finally:
        for dropout in switches:
            dropout.eval()


def adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds a LoRA factor and the layer it wraps: LoRA and DoRA, linear, expert and embedding."""
    for name, module in model.named_modules():
        if "lora_a" in module and ("linear" in module or "embedding" in module):
            yield name, module


def wrapped(adapter: nn.Module) -> nn.Module:
    """The layer of the base that an adapter is wrapped around."""
    return adapter["linear"] if "linear" in adapter else adapter["embedding"]


def _parameter_count(model: nn.Module) -> int:
    """Parameters of the model as if unpacked: a quantized weight of b bits holds 32 / b values in each uint32."""
    total = 0
    for _, module in model.named_modules():
        packed = hasattr(module, "bits") and "scales" in module
        for name, value in module.items():
            if not isinstance(value, mx.array) or (packed and name in ("scales", "biases")):
                continue
            total += value.size * 32 // module.bits if packed and name == "weight" else value.size
    return total
