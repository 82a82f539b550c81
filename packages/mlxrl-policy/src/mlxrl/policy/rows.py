"""Quantized products over one matrix of rows.

On CUDA, `mx.quantized_matmul` takes x `[..., M, D]` for a batch of matrices of M rows, and reads the weights once for
each: a decode step, `[B, 1, D]`, reads them B times. As one matrix `[B, D]` it reads them once. The layer's *instance*
is moved to a subclass of its class, so that it stays what mlx-lm takes it for.
"""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


def on_cuda() -> bool:
    """Whether what is computed now is computed by MLX's CUDA backend."""
    return mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu


def flatten_quantized_rows(model: nn.Module) -> None:
    """Make every quantized linear layer, and a quantized embedding used as one, multiply its input as one matrix.

    Values, gradients, parameters and their names stay as they are. Layers of classes derived from MLX's own keep their
    products.

    Args:
        model: any module, adapters included; changed in place. Asking twice is asking once.
    """
    for module in model.modules():
        if type(module) in _FLAT:
            module.__class__ = _FLAT[type(module)]


class FlatQuantizedLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` over x `[..., D]` as one matrix."""

    def __call__(self, x: mx.array) -> mx.array:
        return _over_rows(super().__call__, x)


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` whose `as_linear` takes x `[..., D]` as one matrix."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _over_rows(super().as_linear, x)


def _over_rows(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    *leading, width = x.shape
    y = product(x.reshape(math.prod(leading), width))
    return y.reshape(*leading, y.shape[-1])


_FLAT: dict[type, type] = {
    nn.QuantizedLinear: FlatQuantizedLinear,
    nn.QuantizedEmbedding: FlatQuantizedEmbedding,
}
