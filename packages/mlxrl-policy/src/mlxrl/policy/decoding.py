"""Adapters and dense layers with few launches while tokens are drawn.

A decode step costs what its launches cost as much as what it computes, and an adapter beside a projection brings six:
two casts, two narrow products, a scaling and a sum. Here it is two products and a sum, with the factors scaled and
rounded to the type that the model computes in. On CUDA, where a product is the dearest launch of all, it is one kernel,
and so is a dense layer (`few_rows.py`); they have no gradient. So all of this acts only within `decoding`.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from mlxrl.policy.dora import LeanDoRALinear
from mlxrl.policy.few_rows import FewRowsLinear, has_few_rows_kernel
from mlxrl.policy.rows import on_cuda

# Partial sums that a thread keeps on CUDA: a wider adapter takes the two products.
MAX_RANK = 64
THREADS = 256
COLUMNS = 1024
"""Outputs of one block, each of which computes A x again: it is small, and a second launch is not."""


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Within the context, decode steps `[B, 1, D]` take few launches a layer; gradients are not for here.

    Args:
        model: the policy, in evaluation mode; its adapters must not change within the context.
    """
    kinds: dict[type, type] = {LoRALinear: DecodingLoRALinear, LeanDoRALinear: DecodingDoRALinear}
    if has_few_rows_kernel():
        kinds[nn.Linear] = FewRowsLinear
    layers = [(module, type(module)) for module in model.modules() if type(module) in kinds]
    for layer, kind in layers:
        layer.__class__ = kinds[kind]
    try:
        yield
    finally:
        for layer, kind in layers:
            layer.__class__ = kind
            layer.__dict__.pop("_of_context", None)


class DecodingLoRALinear(LoRALinear):
    """`LoRALinear` as the base's product, two more and a sum, whatever the number of tokens: alike, they round alike.

    On CUDA a decode step is the base's product and one kernel.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return _with_term(self, x, self.linear(x))


class DecodingDoRALinear(LeanDoRALinear):
    """`LeanDoRALinear` whose term is that of `DecodingLoRALinear`, and whose norms are taken once a context."""

    def __call__(self, x: mx.array) -> mx.array:
        direction = _with_term(self, x, self._base_product(x))
        return self._of_magnitude(direction, _once(self, "stretch", lambda: self.stretch(x.dtype).astype(x.dtype)))


def _with_term(layer: Any, x: mx.array, y: mx.array) -> mx.array:
    """y + s B A x, for the base's product y."""
    if x.shape[-2] == 1 and on_cuda() and layer.lora_a.shape[1] <= MAX_RANK:
        return add_low_rank(x, y, layer.lora_a, layer.lora_b, layer.scale)
    a, b = _once(layer, "factors", lambda: (layer.lora_a.astype(y.dtype), (layer.scale * layer.lora_b).astype(y.dtype)))
    return y + (x @ a) @ b  # `mx.addmm` sums in an order that depends on the number of rows


def _once(layer: Any, name: str, make: Callable[[], Any]) -> Any:
    """What is made for a layer, once a context, and is not among its parameters."""
    made = layer.__dict__.get("_of_context")
    if made is None:
        made = {}
        object.__setattr__(layer, "_of_context", made)
    if name not in made:
        made[name] = make()
    return made[name]


def add_low_rank(x: mx.array, y: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """y + scale * (x A) B on CUDA, with sums in float32 and the term rounded to y's type before it is added.

    Args:
        x: inputs `[..., D]`.
        y: outputs of the base `[..., N]`.
        a: `[D, r]`.
        b: `[r, N]`.
        scale: factor of the low-rank term.

    Returns:
        `[..., N]` of y's type.
    """
    return _adding(y.shape[0], scale)(x, y, a, b)


@lru_cache(maxsize=256)
def _adding(rows: int, scale: float) -> Any:
    """The sum over so many rows, compiled: the call of a kernel that is not writes its source anew."""

    def add(x: mx.array, y: mx.array, a: mx.array, b: mx.array) -> mx.array:
        (width, rank), outputs = a.shape, b.shape[1]
        results = _kernel(rank, scale)(
            inputs=[x, y, a, b],
            template=[("X", x.dtype), ("T", y.dtype), ("FACTOR", a.dtype), ("WIDTH", width), ("OUTPUTS", outputs)],
            grid=(THREADS * -(-outputs // COLUMNS), y.size // outputs, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[y.shape],
            output_dtypes=[y.dtype],
        )
        return results[0]

    return mx.compile(add)


@lru_cache(maxsize=8)
def _kernel(rank: int, scale: float) -> Any:
    digits = re.sub(r"\W", "_", f"{float(scale)!r}")  # MLX knows a kernel by its name, whatever its source
    return mx.fast.cuda_kernel(
        name=f"add_low_rank_{rank}_{digits}",
        input_names=["x", "y", "a", "b"],
        output_names=["out"],
        source=SOURCE.replace("RANK", str(rank)).replace("SCALE", f"{float(scale)!r}f"),
    )


# One block: one row, COLUMNS outputs. First A x, summed over the threads; then its product with B, added to y.
SOURCE = """
    __shared__ float part[8][RANK];
    const int row = blockIdx.y, thread = threadIdx.x;
    float sum[RANK];
    for (int r = 0; r < RANK; ++r) sum[r] = 0.f;
    for (int i = thread; i < WIDTH; i += 256) {
        const float value = static_cast<float>(x[row * WIDTH + i]);
        for (int r = 0; r < RANK; ++r) sum[r] += value * static_cast<float>(a[i * RANK + r]);
    }
    for (int r = 0; r < RANK; ++r) {
        for (int step = 16; step > 0; step /= 2) sum[r] += __shfl_down_sync(0xffffffffu, sum[r], step);
        if (thread % 32 == 0) part[thread / 32][r] = sum[r];
    }
    __syncthreads();
    for (int r = 0; r < RANK; ++r) {
        sum[r] = 0.f;
        for (int warp = 0; warp < 8; ++warp) sum[r] += part[warp][r];
    }
    const int first = blockIdx.x * 1024;
    const int last = first + 1024 < OUTPUTS ? first + 1024 : OUTPUTS;
    for (int n = first + thread; n < last; n += 256) {
        float term = 0.f;
        for (int r = 0; r < RANK; ++r) term += sum[r] * static_cast<float>(b[r * OUTPUTS + n]);
        const float rounded = static_cast<float>(static_cast<T>(SCALE * term));
        out[row * OUTPUTS + n] = static_cast<T>(static_cast<float>(y[row * OUTPUTS + n]) + rounded);
    }
"""
