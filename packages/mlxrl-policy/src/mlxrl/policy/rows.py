"""Quantized products on CUDA, where tokens are drawn and where texts are read.

`mx.quantized_matmul` takes x `[..., M, D]` for a batch of matrices of M rows, and reads the weights once for each: a
decode step, `[B, 1, D]`, reads them B times. As one matrix `[B, D]` it reads them once. Over thousands of rows it takes
three times as long as a dense product, backwards through a large vocabulary seven times, and for many a number of rows
it compiles a kernel, which takes half a minute: where texts are read, the weights are dequantized for the product and
let go again. The layer's *instance* is moved to a subclass of its class, so that it stays what mlx-lm takes it for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def on_cuda() -> bool:
    """Whether what is computed now is computed by MLX's CUDA backend."""
    return mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu


def flatten_quantized_rows(model: nn.Module) -> None:
    """Make every quantized linear layer, and a quantized embedding used as one, multiply its input as one matrix.

    On CUDA, weights are dequantized for it unless a token is drawn. Parameters and their names stay as they are, and so
    do values and gradients within rounding. Layers of classes derived from MLX's own keep their products.

    Args:
        model: any module, adapters included; changed in place. Asking twice is asking once.
    """
    for module in model.modules():
        if type(module) in _FLAT:
            module.__class__ = _FLAT[type(module)]


class FlatQuantizedLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` over x `[..., D]` as one matrix."""

    def __call__(self, x: mx.array) -> mx.array:
        if _is_text(x):
            y = dequantized_product(self, x)
            return y + self.bias if "bias" in self else y
        return _over_rows(super().__call__, x)


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` whose `as_linear` takes x `[..., D]` as one matrix."""

    def as_linear(self, x: mx.array) -> mx.array:
        return dequantized_product(self, x) if _is_text(x) else _over_rows(super().as_linear, x)


def dequantized_product(layer: Any, x: mx.array) -> mx.array:
    """x W^T with W dequantized to the type of x, in the backward pass again rather than kept.

    Args:
        layer: a quantized linear layer or embedding, whose bias is left out.
        x: `[..., D]`.

    Returns:
        `[..., N]` of x's type.
    """

    def weight() -> mx.array:
        held, key = _held_weights.get(), (id(layer.weight), x.dtype)
        if held is None:
            return _dequantized(layer, x.dtype)
        if key not in held:
            held[key] = layer.weight, _dequantized(layer, x.dtype)
        return held[key][1]

    def product(x: mx.array) -> mx.array:
        return x @ weight().T

    def backward(x: mx.array, slope: mx.array, output: mx.array) -> mx.array:
        return slope @ weight()

    run: Any = mx.custom_function(product)
    run.vjp(backward)
    return run(x)


@contextmanager
def dequantized_once() -> Iterator[None]:
    """Within the context a layer's weights are dequantized for its first product, and held for the others."""
    token = _held_weights.set({})
    try:
        yield
    finally:
        _held_weights.reset(token)


# By the packed weight, which is held beside the dense one, so that no other takes its id; and by type.
_Held = dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]]
_held_weights: ContextVar[_Held | None] = ContextVar("held_weights", default=None)


def _dequantized(layer: Any, dtype: mx.Dtype) -> mx.array:
    parts = layer.weight, layer.scales, layer.get("biases")
    return mx.dequantize(*parts, layer.group_size, layer.bits, layer.mode).astype(dtype)


def _is_text(x: mx.array) -> bool:
    decodes = x.ndim > 1 and x.shape[-2] == 1  # many rows of one token each
    return not decodes and on_cuda()


def _over_rows(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    *leading, width = x.shape
    y = product(x.reshape(-1, width))
    return y.reshape(*leading, y.shape[-1])


_FLAT: dict[type, type] = {
    nn.QuantizedLinear: FlatQuantizedLinear,
    nn.QuantizedEmbedding: FlatQuantizedEmbedding,
}
