"""What rows of logits say of their targets, on CUDA as one kernel.

Left to MLX's compiler, a vocabulary of 151,936 is written and read in float32 some thirty times; here its logits are
read three times, of which the device's cache holds all but the first, and their slopes are written once.
"""

from functools import lru_cache
from typing import Any

import mlx.core as mx

THREADS = 1024
"""Of one block, which takes one row; the kernel's sums are laid out for 32 warps."""


def judged_by_kernel(
    logits_C_V: mx.array, targets_C: mx.array, temperature_C: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What `judged` returns, computed in float32, with the slopes in the logits' own type; it has no gradient.

    Args:
        logits_C_V: `[C, V]`.
        targets_C: int32 `[C]`.
        temperature_C: float32 `[C]`, above 0.

    Returns:
        Log-probabilities, entropies, 1 where no token is likelier, float32 `[C]`, and d logprob / d logits `[C, V]`.
    """
    rows, vocabulary = logits_C_V.shape
    logprobs_C, entropy_C, is_top_C, slope_C_V = _kernel()(
        inputs=[logits_C_V, targets_C, temperature_C],
        template=[("T", logits_C_V.dtype), ("V", vocabulary)],
        grid=(THREADS * rows, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows,), (rows,), (rows,), (rows, vocabulary)],
        output_dtypes=[mx.float32, mx.float32, mx.float32, logits_C_V.dtype],
    )
    return logprobs_C, entropy_C, is_top_C, slope_C_V


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="judge_logits",
        input_names=["logits", "targets", "temperature"],
        output_names=["logprobs", "entropy", "is_top", "slope"],
        source=SOURCE,
    )


# The largest logit; the sums over the exponentials, whose shifted logits of -inf have weight 0, not NaN; the slopes.
SOURCE = """
    __shared__ float part[32];
    const int row = blockIdx.x, thread = threadIdx.x;
    const T* here = logits + static_cast<size_t>(row) * V;
    T* there = slope + static_cast<size_t>(row) * V;
    const float warmth = temperature[row];
    auto scaled = [&](int i) { return static_cast<float>(here[i]) / warmth; };
    auto over_row = [&](float value, bool largest) {
        for (int round = 0; round < 2; ++round) {
            for (int step = 16; step > 0; step /= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, value, step);
                value = largest ? fmaxf(value, other) : value + other;
            }
            if (round == 1) break;
            if (thread % 32 == 0) part[thread / 32] = value;
            __syncthreads();
            value = part[thread % 32];
            __syncthreads();
        }
        return value;
    };

    float top = scaled(0);
    for (int i = thread; i < V; i += 1024) top = fmaxf(top, scaled(i));
    top = over_row(top, true);

    float total = 0.f, mean = 0.f;
    for (int i = thread; i < V; i += 1024) {
        const float shifted = scaled(i) - top;
        total += expf(shifted);
        mean += expf(shifted) * fmaxf(shifted, -1000.f);
    }
    total = over_row(total, false);
    mean = over_row(mean, false) / total;

    const int target = targets[row];
    for (int i = thread; i < V; i += 1024) {
        const float share = expf(scaled(i) - top) / total;
        there[i] = static_cast<T>(((i == target ? 1.f : 0.f) - share) / warmth);
    }
    if (thread == 0) {
        const float shifted = scaled(target) - top;
        logprobs[row] = shifted - logf(total);
        entropy[row] = logf(total) - mean;
        is_top[row] = shifted == 0.f ? 1.f : 0.f;
    }
"""
