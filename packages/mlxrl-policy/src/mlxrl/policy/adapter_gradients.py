"""Adapters under a gradient: of each layer its input is kept and nothing else, and that no longer than needed.

Autodiff keeps more. An adapter's factors are float32, so the input of a layer that computes in 16 bits is cast, and the
cast is kept; here the backward pass casts again. And MLX computes the gradients in the order of the layers, of which
the backward pass reaches the first last: meanwhile the slopes of all others wait. Here a layer's gradient is computed
before the slope that the layer below waits for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear


@contextmanager
def lean_adapters(module: nn.Module) -> Iterator[None]:
    """Within the context every LoRA layer of `module` that is called keeps its input alone; values stay as they are."""
    layers = [layer for layer in module.modules() if type(layer) is LoRALinear]
    for layer in layers:
        layer.__class__ = LeanLoRALinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = LoRALinear


class LeanLoRALinear(LoRALinear):
    """`LoRALinear` whose low-rank term is one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + low_rank_term(self.dropout(x), self.lora_a, self.lora_b, self.scale)


def low_rank_term(x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """scale * (x A) B, computed in the type of the factors and rounded once to that of x.

    Args:
        x: `[..., D]`.
        a: `[D, r]`.
        b: `[r, N]`.
        scale: factor.

    Returns:
        `[..., N]` of x's type.
    """

    def forward(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return (scale * ((x @ a) @ b)).astype(x.dtype)

    def backward(primals: tuple[mx.array, ...], slope: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        x, a, b = primals
        (x,) = mx.depends([x], [slope])  # or MLX would cast the inputs of all layers at once
        x_M_D, slope_M_N = (values.reshape(-1, values.shape[-1]).astype(a.dtype) for values in (x, slope))
        slope_M_N = scale * slope_M_N
        slope_M_r = slope_M_N @ b.T
        slope_a, slope_b = x_M_D.T @ slope_M_r, (x_M_D @ a).T @ slope_M_N
        slope_x = (slope_M_r @ a.T).astype(x.dtype).reshape(x.shape)
        # the factors' gradients first: left for the end, they would keep x and the slope of every layer
        (slope_x,) = mx.depends([slope_x], [slope_a, slope_b])
        return slope_x, slope_a, slope_b

    run: Any = mx.custom_function(forward)
    run.vjp(backward)
    return run(x, a, b)
