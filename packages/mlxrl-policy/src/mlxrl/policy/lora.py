"""LoRA on a frozen base: attach, describe, switch off."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxrl.policy.dora import keep_bases_packed
from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import blocks_of
from mlxrl.policy.targets import EXPERT_TYPES, select_layers

ADAPTER_LEAVES = ("lora_a", "lora_b", "m")
"""What is trained of an adapter: its two factors and, of DoRA, the magnitudes."""

# Architectures that mlx-lm itself cannot train, by the module that defines them, and why.
UNTRAINABLE = {
    "deepseek_v41": "its router and its index pick entries by numbers that carry a gradient, and MLX has none for them",
}

# Architectures whose scores are wrong in mlx-lm, so that no policy can be made of them.
UNSCORABLE = {
    "phi3small": "it adds a boolean mask to its attention scores, so that a token sees those behind it, padding too",
}


@dataclass(frozen=True)
class LoRAConfig:
    """How the adapter is built: `y = W x + scale * B A x`, A and B of rank `rank`. Hu et al. 2021, arXiv 2106.09685.

    Args:
        rank: inner width of the two factors, at least 1.
        scale: factor of the low-rank term (alpha / rank elsewhere), above 0.
        dropout: share of the adapter's inputs dropped while a gradient is taken, in [0, 1).
        grad_checkpoint: recompute each block in the backward pass instead of keeping its activations.
        rank_stabilized: divide alpha = scale * rank by sqrt(rank), not by rank; see `factor`.
        use_dora: train the norm of each row of the weight beside its direction. Liu et al. 2024, arXiv 2402.09353.
        targets: the linear layers to adapt, experts included, as `mlxrl.policy.targets.is_target` reads them; by
            default every one of every block.
        last_layers: adapt so many of the last blocks; None takes all.
        seed: seed of the initial `lora_a` (`lora_b` starts at 0, so that the policy starts as the base), at least 0.

    Raises:
        ModelError: a value is of another type or out of its range.
    """

    rank: int = 16
    scale: float = 2.0
    dropout: float = 0.0
    grad_checkpoint: bool = False
    rank_stabilized: bool = False
    use_dora: bool = False
    targets: tuple[str, ...] | list[str] = ()
    last_layers: int | None = None
    seed: int = 0

    @property
    def factor(self) -> float:
        """What the low-rank term is multiplied by: scale, or scale * sqrt(rank) if rank-stabilised.

        With alpha = scale * rank these are alpha / rank and alpha / sqrt(rank). Kalajdzievski 2023, arXiv 2312.03732.
        """
        return self.scale * math.sqrt(self.rank) if self.rank_stabilized else self.scale

    def __post_init__(self) -> None:
        _check_whole("rank", self.rank, at_least=1)
        if not isinstance(self.scale, Real) or not 0 < self.scale < math.inf:
            raise ModelError(f"LoRA scale must be a finite number above 0, got {self.scale!r}.")
        if not isinstance(self.dropout, Real) or not 0 <= self.dropout < 1:
            raise ModelError(f"LoRA dropout must be in [0, 1), got {self.dropout!r}.")
        if self.last_layers is not None:
            _check_whole("last_layers", self.last_layers, at_least=1)
        _check_whole("seed", self.seed, at_least=0)
        if not isinstance(self.targets, (list, tuple)) or not all(isinstance(name, str) for name in self.targets):
            raise ModelError(f"LoRA targets must be a list of names such as ['q_proj'], got {self.targets!r}.")


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ModelError(f"LoRA {name} must be a whole number of at least {at_least}, got {value!r}.")


@dataclass(frozen=True)
class PolicyReport:
    """What was loaded and what will be trained."""

    model_type: str
    context_length: int | None
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
    """Freeze `model` and give the linear layers of its blocks an adapter; only what the adapters add stays trainable.

    Args:
        model: an mlx-lm model; changed in place.
        config: rank, scale, dropout, kind, layers and seed.

    Returns:
        The names of the adapted layers as mlx-lm's `keys`, sorted; see `select_layers`.

    Raises:
        ModelError: the model carries adapters already, is of an architecture that cannot be trained, `config` names
            layers that it does not have, or asks for DoRA on layers of experts or of 3, 5 or 6 bits; or the model
            without its adapters is not the base.
    """
    if any(adapters_of(model)):
        raise ModelError("the model already carries LoRA layers; load it again before attaching new ones.")
    architecture = architecture_of(model)
    if architecture in UNTRAINABLE:
        raise ModelError(
            f"mlx-lm cannot train the architecture {architecture}: {UNTRAINABLE[architecture]}; choose another model."
        )
    if not hasattr(model, "_no_grad"):  # recurrent_gemma does not initialise its outermost module
        nn.Module.__init__(model)
    layers, keys = select_layers(model, config.targets, config.last_layers)
    if config.use_dora:
        _check_dora(layers)
    base: dict[str, Any] = dict(tree_flatten(model.parameters()))
    mx.random.seed(config.seed)  # mlx-lm draws lora_a from the global state
    parameters = {"rank": config.rank, "scale": config.factor, "dropout": config.dropout, "keys": keys}
    linear_to_lora_layers(model, config.last_layers or len(blocks_of(model)), parameters, use_dora=config.use_dora)
    keep_bases_packed(model)
    model.freeze()
    for _, module in adapters_of(model):
        leaves = {leaf: module[leaf] for leaf in ADAPTER_LEAVES if leaf in module}
        module.unfreeze(
            keys=[name for name, _ in tree_flatten(leaves)], recurse=False
        )  # a fused layer has lists of them
    model.eval()
    with adapters_disabled(model):
        reference: dict[str, Any] = dict(tree_flatten(model.parameters()))
    if differ := [name for name in sorted(base | reference) if base.get(name) is not reference.get(name)]:
        raise ModelError(f"without its adapters the model is not its base: {differ[0]} differs; adapt other layers.")
    return keys


def _check_dora(layers: Mapping[str, nn.Module]) -> None:
    for path, layer in sorted(layers.items()):
        if isinstance(layer, EXPERT_TYPES):
            raise ModelError(
                f"use_dora has no form for layers of experts, and {path} is one; leave it out, or set targets to "
                "other layers, e.g. ['self_attn']."
            )
        # mlx-lm reckons a packed layer's inputs as if 32 bits held a whole number of weights
        if isinstance(layer, nn.QuantizedLinear) and 32 % layer.bits:
            raise ModelError(
                f"use_dora has no form for layers of {layer.bits} bits, and {path} is one; leave it out, or take a "
                "model of 4 or 8 bits."
            )


def refuse_unscorable(model: nn.Module) -> None:
    """Raise ModelError where mlx-lm's implementation of the architecture gives wrong scores."""
    architecture = architecture_of(model)
    if architecture in UNSCORABLE:
        raise ModelError(
            f"mlx-lm scores the architecture {architecture} wrongly: {UNSCORABLE[architecture]}; choose another model."
        )


def architecture_of(model: nn.Module) -> str:
    """Name of the module of `mlx_lm.models` that defines the model."""
    return type(model).__module__.rpartition(".")[2]


def describe(
    model: nn.Module, *, model_type: str, context_length: int | None, keys: tuple[str, ...], separable_head: bool
) -> PolicyReport:
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
        context_length=context_length,
        dtype=dtypes.most_common(1)[0][0],
        num_layers=len(blocks_of(model)),
        target_keys=keys,
        adapted_per_layer=tuple(len(list(adapters_of(block))) for block in blocks_of(model)),
        trainable_leaves=tuple(leaf for leaf in ADAPTER_LEAVES if any(leaf in name.split(".") for name in trainable)),
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


def check_fits(adapter: str, values: Mapping[str, mx.array], own: Mapping[str, mx.array]) -> None:
    """Raise ModelError where an adapter, called `adapter` in words, has other names or shapes than a policy's own."""
    if unknown := sorted(values.keys() ^ own.keys()):
        raise ModelError(
            f"{adapter} fits another policy: {len(unknown)} tensors are on one side only, the first is {unknown[0]}; "
            "load the policy with the layers the adapter was trained on."
        )
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise ModelError(
                f"{adapter} fits another policy: {name} has shape {value.shape}, the policy has {own[name].shape}; "
                "set `rank` to the adapter's."
            )


@contextmanager
def adapter_replaced(model: nn.Module, parameters: Mapping[str, mx.array]) -> Iterator[None]:
    """Within the context the policy has another adapter of the same shape: no second model, only other factors.

    Its own adapter comes back when the context ends, also after an exception.

    Args:
        model: the policy.
        parameters: the other adapter, as `adapter_parameters` gave it.

    Raises:
        ModelError: the model has no adapter, as within `adapters_disabled`, or `parameters` have other names or shapes
            than it has. The policy is then as it was.
    """
    own: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    if not own:
        raise ModelError("the model has no adapter to replace; leave adapters_disabled first, or attach one.")
    check_fits("the adapter in parameters", parameters, own)
    try:
        model.update(tree_unflatten(list(parameters.items())))
        yield
    finally:
        model.update(tree_unflatten(list(own.items())))


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
