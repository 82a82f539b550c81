"""Gated feed-forward layers under a gradient: `silu(gate) * up` keeps gate and up, and nothing computed on the way.

Autodiff keeps the sigmoid and the SiLU as well, which are as wide as gate and up: a fifth of all that a block keeps.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu


@contextmanager
def lean_swiglu(module: nn.Module) -> Iterator[None]:
    """Within the context `swiglu` of mlx-lm keeps its inputs alone in `module`'s layers; values stay as they are.

    A layer whose class is of a module that was loaded without its name in `sys.modules` keeps what it kept.
    """
    sources: list[Any] = [sys.modules.get(name) for name in {type(layer).__module__ for layer in module.modules()}]
    users = [source for source in sources if getattr(source, "swiglu", None) is swiglu]
    for source in users:
        source.swiglu = _lean
    try:
        yield
    finally:
        for source in users:
            source.swiglu = swiglu


def _forward(gate: mx.array, up: mx.array) -> mx.array:
    return swiglu(gate, up)


def _backward(primals: tuple[mx.array, mx.array], slope: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    gate, up = mx.depends(list(primals), [slope])  # or MLX would take the sigmoids of all layers at once
    return _slopes(gate, up, slope)


@partial(mx.compile, shapeless=True)
def _slopes(gate: mx.array, up: mx.array, slope: mx.array) -> tuple[mx.array, mx.array]:
    sigmoid = mx.sigmoid(gate)
    silu = gate * sigmoid
    slope_gate, slope_up = slope * up * (sigmoid + silu * (1 - sigmoid)), slope * silu
    return slope_gate.astype(gate.dtype), slope_up.astype(up.dtype)


_lean: Any = mx.custom_function(_forward)
_lean.vjp(_backward)
