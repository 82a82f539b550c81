"""Adapters under a gradient: of each layer its input is kept and nothing else, and that no longer than needed.

Autodiff keeps more. An adapter's factors are float32, so the input of a layer that computes in 16 bits is cast, and the
cast is kept; here it is not cast (bfloat16), or cast again in the backward pass (float16). And MLX computes the
gradients in the order of the layers, of which the backward pass reaches the first last: meanwhile the slopes of all
others wait. Here a layer's gradient is computed before the slope that the layer below waits for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear


@contextmanager
def lean_adapters(module: nn.Module) -> Iterator[None]:
    """Within the context every LoRA layer of `module` that is called keeps its input alone.

    Values and gradients stay as they are, within rounding.
    """
    layers = [layer for layer in module.modules() if type(layer) is LoRALinear]
    for layer in layers:
        layer.__class__ = LeanLoRALinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = LoRALinear
            layer.__dict__.pop("_made", None)


class LeanLoRALinear(LoRALinear):
    """`LoRALinear` whose low-rank term is one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        term = low_rank_term(self.dropout(x), self.lora_a, self.lora_b, self.scale, self._factors(x.dtype))
        return self.linear(x) + term

    def _factors(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Those of the products, made once for all passes over the same arrays; a change in place would go unseen."""
        a, b, how, factors = self.__dict__.get("_made", (None, None, None, None))
        if factors is None or a is not self.lora_a or b is not self.lora_b or how != (self.scale, dtype):
            factors = product_factors(self.lora_a, self.lora_b, self.scale, dtype)
            made = self.lora_a, self.lora_b, (self.scale, dtype), factors
            object.__setattr__(self, "_made", made)  # not among the parameters
        return factors


def product_factors(a: mx.array, b: mx.array, scale: float, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """A and scale * B in the type that their products with arrays of `dtype` are taken in: `dtype`, or float32.

    bfloat16 has float32's range at half of its bytes: an input cast to float32 and a term in it would be most of what a
    training step reads and writes. Sums are float32 either way. float16 has not that range, small slopes would be lost:
    beside it products are float32.
    """
    kind = mx.float32 if dtype == mx.float16 else dtype
    return a.astype(kind), (scale * b).astype(kind)


def low_rank_term(
    x: mx.array, a: mx.array, b: mx.array, scale: float, factors: tuple[mx.array, mx.array] | None = None
) -> mx.array:
    """scale * (x A) B, rounded to x's type; the factors have gradients of their own type.

    Args:
        x: `[..., D]`.
        a: `[D, r]`.
        b: `[r, N]`.
        scale: factor.
        factors: `product_factors(a, b, scale, x.dtype)`, where they are at hand.

    Returns:
        `[..., N]` of x's type.
    """
    a_D_r, b_r_N = factors or product_factors(a, b, scale, x.dtype)
    kind = a_D_r.dtype

    def forward(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return ((x.astype(kind) @ a_D_r) @ b_r_N).astype(x.dtype)

    def backward(primals: tuple[mx.array, ...], slope: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        x, a, b = primals
        (x,) = mx.depends([x], [slope])  # or MLX would cast the inputs of all layers at once
        x_M_D, slope_M_N = (values.reshape(-1, values.shape[-1]).astype(kind) for values in (x, slope))
        slope_M_r = slope_M_N @ b_r_N.T
        slope_a = (x_M_D.T @ slope_M_r).astype(a.dtype)
        slope_b = scale * ((x_M_D @ a_D_r).T @ slope_M_N).astype(b.dtype)
        slope_x = (slope_M_r @ a_D_r.T).astype(x.dtype).reshape(x.shape)
        # the factors' gradients first: left for the end, they would keep x and the slope of every layer
        (slope_x,) = mx.depends([slope_x], [slope_a, slope_b])
        return slope_x, slope_a, slope_b

    run: Any = mx.custom_function(forward)
    run.vjp(backward)
    return run(x, a, b)
