"""DoRA without the adapted weight: its rows' norms come from products, and no dense weight of a quantized base is kept.

mlx-lm's layer makes W + s B A in every pass to take its norms, and multiplies by a dequantized W that autodiff keeps:
of a 4-bit model all its weights as they were before they were packed. But

    |w_n + s b_n A|^2 = |w_n|^2 + 2 s b_n . (A w_n) + s^2 b_n (A A^T) b_n^T

takes only the norms of the base, which never change, and the base's product with the few rows of A. The layer's
*instance* is moved to a subclass of its class, so that it stays what mlx-lm takes it for.
"""

from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear

from mlxrl.policy.adapter_gradients import low_rank_term
from mlxrl.policy.rows import dequantized_once

# Of a row's squared norm in the base: what rounding leaves of a row that its adapter cancels may be below 0.
LEAST = 1e-4


def keep_bases_packed(model: nn.Module) -> None:
    """Let every DoRA layer of `model` take its norms from products.

    Values and gradients stay as they are, within rounding.

    Args:
        model: with DoRA layers as mlx-lm has just made them, whose magnitudes are the norms of the base; changed in
            place.
    """
    for module in model.modules():
        if type(module) is DoRALinear:
            mx.eval(module.m)  # layer by layer: each takes a dense weight
            module.__class__ = LeanDoRALinear
            object.__setattr__(module, "_base_norms", module.m)  # not among the parameters


class LeanDoRALinear(DoRALinear):
    """`DoRALinear` that multiplies as its base does and never makes the adapted weight.

    y = m / |W + s B A| * (W x + s B A x) + bias, the norms of rows and without a gradient. Liu et al. 2024,
    arXiv 2402.09353, equation 5 and section 4.3.
    """

    def __call__(self, x: mx.array) -> mx.array:
        with dequantized_once():  # if at all: on CUDA
            direction = self._base_product(x) + low_rank_term(self.dropout(x), self.lora_a, self.lora_b, self.scale)
            return self._of_magnitude(direction, self.stretch(x.dtype))

    def stretch(self, dtype: mx.Dtype) -> mx.array:
        """m / |W + s B A| `[N]`, float32, from products of `dtype`; the magnitudes m alone carry a gradient."""
        a_D_r, b_r_N = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b)
        base_r_N = self._base_product(a_D_r.T.astype(dtype)).astype(mx.float32)
        slope_r_N = 2 * self.scale * base_r_N + self.scale**2 * (a_D_r.T @ a_D_r) @ b_r_N
        base_N = mx.square(self.__dict__["_base_norms"])
        return self.m / mx.sqrt(mx.maximum(base_N + (b_r_N * slope_r_N).sum(axis=0), LEAST * base_N))

    def _base_product(self, x: mx.array) -> mx.array:
        """W x, however the base multiplies."""
        base: Any = self.linear
        if "bias" in base:
            base = copy(base)
            del base["bias"]
        return base(x)

    def _of_magnitude(self, direction: mx.array, stretch_N: mx.array) -> mx.array:
        y, base = _stretched(direction, stretch_N), self.linear
        return y + base["bias"] if "bias" in base else y


def _forward(direction: mx.array, stretch_N: mx.array) -> mx.array:
    return stretch_N.astype(direction.dtype) * direction


def _backward(primals: tuple[mx.array, mx.array], slope: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    direction, stretch_N = primals
    slope_N = (slope * direction).reshape(-1, stretch_N.size).astype(stretch_N.dtype).sum(axis=0)
    # first: left for the end, as MLX does, it would keep direction and slope of every layer
    (slope,) = mx.depends([slope], [slope_N])
    return stretch_N.astype(slope.dtype) * slope, slope_N


_stretched: Any = mx.custom_function(_forward)
_stretched.vjp(_backward)
