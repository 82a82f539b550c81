"""A second copy of the policy to sample from: dense, with the adapters merged into it.

A product with an adapter beside it, or with quantized weights over many rows, costs more than a dense one; the copy
buys that back with memory. Weights are dequantized and merged in float32 and rounded once, to float16 where the model
computes in 16 bits: the steps of bfloat16 are 8 times as wide, and most of a young adapter would be lost in them.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from mlxrl.policy.checkpointing import checkpoint_blocks
from mlxrl.policy.column_major import column_major
from mlxrl.policy.dora import LeanDoRALinear
from mlxrl.policy.errors import ModelError
from mlxrl.policy.lora import adapters_of, wrapped
from mlxrl.policy.rows import FlatQuantizedEmbedding, FlatQuantizedLinear

ADAPTER_TYPES = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, LeanDoRALinear, DoRAEmbedding)
DENSE_TYPES: dict[type, type[Any]] = {
    nn.QuantizedLinear: nn.Linear,
    FlatQuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    FlatQuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
WEIGHT_LEAVES = ("weight", "scales", "biases", "global_scale")


class MergedPolicy:
    """A dense copy of the policy without adapters, equal to the policy as it was when the copy was last renewed.

    Where most of the base is bfloat16 or float16 the copy is float16, but for parameters that the model keeps in
    float32 beside them; elsewhere it is float32. The policy is never changed; arrays that need no change are shared.

    Args:
        model: the policy, an mlx-lm model.

    Attributes:
        model: the copy, of the model's own classes, in evaluation mode and frozen.

    Raises:
        ModelError: an adapter is of a class that cannot be merged.
    """

    def __init__(self, model: nn.Module):
        self._policy = model
        self._main_type = _main_type(model)
        self._merged: list[tuple[nn.Module, Any]] = []
        self.model: nn.Module = self._copied()

    def renew(self) -> None:
        """Merge the adapters as they are now; of the float32 weights, one layer's exist at a time.

        What carries no adapter is frozen, and is taken as it was when the copy was made. Where other layers carry one
        now (`adapters_disabled`), the copy is made anew.
        """
        if {id(adapter) for _, adapter in adapters_of(self._policy)} == {id(adapter) for adapter, _ in self._merged}:
            for adapter, dense in self._merged:
                _set_weight(dense, _merged_weight(adapter), dense.weight.dtype)
            return
        self._merged, self.model = [], nn.Module()  # the old copy goes before the new one comes
        self.model = self._copied()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the copy holds and the policy does not."""
        theirs = _arrays(self._policy)
        return sum(value.nbytes for key, value in _arrays(self.model).items() if key not in theirs)

    def _copied(self) -> nn.Module:
        for name, adapter in adapters_of(self._policy):
            layer = wrapped(adapter)
            if type(adapter) not in ADAPTER_TYPES or ("scales" in layer and type(layer) not in DENSE_TYPES):
                raise ModelError(
                    f"adapter {name} is a {type(adapter).__name__} on a {type(layer).__name__}, which cannot be "
                    "merged; sample from the policy itself."
                )
        copy = self._copy(self._policy, {})
        checkpoint_blocks(copy, enabled=False)
        copy.eval()
        copy.freeze()
        return copy

    def _copy(self, value: Any, copies: dict[int, Any]) -> Any:
        """The copy of a module, an array or a container of them; one that the model holds twice is copied once."""
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, mx.array):
            copy = self._cast(value)
        elif isinstance(value, nn.Module) and type(value) in (*ADAPTER_TYPES, *DENSE_TYPES):
            copy = self._dense(value)
        elif isinstance(value, nn.Module):
            items = {name: self._copy(item, copies) for name, item in value.items()}
            copy = _new_module(type(value), value.__dict__, items)
        elif isinstance(value, dict):
            copy = {name: self._copy(item, copies) for name, item in value.items()}
        elif isinstance(value, (list, tuple)):
            copy = type(value)(self._copy(item, copies) for item in value)
        else:
            return value
        copies[id(value)] = copy
        return copy

    def _cast(self, array: mx.array) -> mx.array:
        if self._main_type != mx.bfloat16 or array.dtype != mx.bfloat16:
            return array
        cast = array.astype(mx.float16)
        mx.eval(cast)  # array by array, so that no graph holds many
        return cast

    def _dense(self, module: nn.Module) -> nn.Module:
        """An adapter, or a bare quantized layer, as the dense layer that it stands for."""
        layer: Any = wrapped(module) if type(module) in ADAPTER_TYPES else module
        kind = DENSE_TYPES.get(type(layer), type(layer))
        attributes = layer.__dict__ if kind is type(layer) else {}  # those of a quantized layer are how it is packed
        dense = _new_module(kind, attributes, {n: self._cast(v) for n, v in layer.items() if n not in WEIGHT_LEAVES})
        is_float32 = self._main_type not in (mx.bfloat16, mx.float16) or layer.weight.dtype == mx.float32
        dtype = mx.float32 if is_float32 else mx.float16
        if module is layer:
            _set_weight(dense, _exact_weight(layer), dtype)
        else:
            _set_weight(dense, _merged_weight(module), dtype)
            self._merged.append((module, dense))
        return dense


def _main_type(model: nn.Module) -> mx.Dtype:
    """The type of most floating values of the base; adapters are float32 beside a base of any type."""
    factors = {id(value) for _, adapter in adapters_of(model) for value in adapter.values()}
    sizes: Counter[mx.Dtype] = Counter()
    for key, value in _arrays(model).items():
        if key not in factors and mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] += value.size
    return sizes.most_common(1)[0][0]


def _arrays(model: nn.Module) -> dict[int, mx.array]:
    return {id(value): value for _, value in tree_flatten(model) if isinstance(value, mx.array)}


def _new_module(kind: type[Any], attributes: Mapping[str, Any], items: Mapping[str, Any]) -> Any:
    """A module made without its constructor, which would draw weights from the global random state."""
    module = nn.Module.__new__(kind)
    module.__dict__.update({"_training": False, **attributes, "_no_grad": set()})
    dict.update(module, items)
    return module


def _set_weight(dense: Any, weight: mx.array, dtype: mx.Dtype) -> None:
    weight = weight.astype(dtype)
    if mx.default_device().type == mx.cpu and weight.ndim == 2:
        weight = column_major(weight)
    mx.eval(weight)  # layer by layer: what it is made of goes before the next one comes
    dense.weight = weight


def _exact_weight(layer: Any) -> mx.array:
    """The weight in float32. Scales and biases are cast before the product: in 16 bits, MLX would round it to those."""
    if "scales" not in layer:
        return layer.weight.astype(mx.float32)
    if layer.mode == "affine":
        scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        return mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits)

    def dequantize(weight: mx.array, scales: mx.array, global_scale: mx.array | None = None) -> mx.array:
        return mx.dequantize(
            weight, scales, None, layer.group_size, layer.bits, layer.mode, global_scale, dtype=mx.float32
        )

    global_scale_E = layer.get("global_scale")
    if global_scale_E is None:
        return dequantize(layer.weight, layer.scales)
    return mx.stack([dequantize(*expert) for expert in zip(layer.weight, layer.scales, global_scale_E, strict=True)])


def _merged_weight(adapter: Any) -> mx.array:
    """The float32 weight of the layer that acts as the adapter and what it wraps act together."""
    a, b = adapter.lora_a.astype(mx.float32), adapter.lora_b.astype(mx.float32)
    if a.ndim == 3:
        product = b @ a  # [E, out, r] and [E, r, in]
    elif "embedding" in adapter:
        product = a @ b  # [V, r] and [r, D]
    else:
        product = (a @ b).T  # [in, r] and [r, out]
    weight = _exact_weight(wrapped(adapter)) + adapter.scale * product
    if "m" in adapter:  # DoRA: row i has the norm m[i]
        weight = weight * (adapter.m.astype(mx.float32) / mx.linalg.norm(weight, axis=1))[:, None]
    return weight
