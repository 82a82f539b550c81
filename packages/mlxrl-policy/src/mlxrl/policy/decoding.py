"""Adapters in one kernel each while tokens are drawn, on CUDA.

There a decode step costs what its launches cost, and the two narrow products of an adapter are the dearest of them:
beside every projection they take longer than the model. One kernel adds both to the product of the base. It has no
gradient, so that it acts only within `decoding`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

# Partial sums that a thread keeps: wider adapters take the two products.
MAX_RANK = 64
THREADS = 256
COLUMNS = 1024
"""Outputs of one block, each of which computes A x again: it is small, and a second launch is not."""


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Within the context, decode steps `[B, 1, D]` on CUDA take each LoRA layer as one kernel; no gradients.

    Args:
        model: the policy, in evaluation mode.
    """
    layers = [module for module in model.modules() if type(module) is LoRALinear] if mx.cuda.is_available() else []
    for layer in layers:
        layer.__class__ = DecodingLoRALinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = LoRALinear


class DecodingLoRALinear(LoRALinear):
    """`LoRALinear` whose decode step is the base's product and one kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        rank = self.lora_a.shape[1]
        if x.shape[-2] != 1 or rank > MAX_RANK:
            return super().__call__(x)
        y = self.linear(x)
        return add_low_rank(x, y, self.lora_a, self.lora_b, self.scale)


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
    (width, rank), outputs = a.shape, b.shape[1]
    results = _kernel(rank, scale)(
        inputs=[x, y, a, b],
        template=[("T", y.dtype), ("WIDTH", width), ("OUTPUTS", outputs)],
        grid=(THREADS * -(-outputs // COLUMNS), y.size // outputs, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[y.shape],
        output_dtypes=[y.dtype],
    )
    return results[0]


@lru_cache(maxsize=8)
def _kernel(rank: int, scale: float) -> Any:
    return mx.fast.cuda_kernel(
        name=f"add_low_rank_{rank}",
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
