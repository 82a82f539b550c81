"""Dense products of a few rows on CUDA, as one kernel.

MLX hands a product of two or more rows to cuBLAS, which it asks for a way and whose launch it captures, for each
product anew: some 15 us of the host, and a decode step has 200 of them while the device waits. This kernel costs a
launch. A row's sums are laid out alike whatever the number of rows, so a row does not depend on its neighbours.
"""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.rows import on_cuda

MIN_ROWS, MAX_ROWS = 2, 64
"""One row has a kernel of MLX's own; of more than 64 the weights would be read again for each 64."""
MANY_ROWS, LARGE = 17, 2**24
"""Where the device is what takes time: 67 million values times 64 rows take the kernel 90 us, and cuBLAS 45."""
WARPS, OUTPUTS = 8, 32
"""Of one block, whose warps share out the terms of its outputs' sums; the kernel is laid out for these."""


def has_few_rows_kernel() -> bool:
    """Whether this is a CUDA device whose tensor cores multiply bfloat16, as they do from compute capability 8.0 on."""
    return on_cuda() and int(mx.device_info()["compute_capability_major"]) >= 8


class FewRowsLinear(nn.Linear):
    """`nn.Linear` whose decode step `[B, 1, D]` is the kernel where that can be."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if not can_multiply(x, weight):
            return super().__call__(x)
        y = few_rows_product(x, weight)
        return y + self["bias"] if "bias" in self else y


def can_multiply(x: mx.array, weight: mx.array) -> bool:
    """Whether `few_rows_product` takes x and the weight `[N, D]`, and takes less time than cuBLAS."""
    shape, dtype = x.shape, x.dtype
    if len(shape) != 3 or shape[1] != 1 or not MIN_ROWS <= shape[0] <= MAX_ROWS:
        return False
    if shape[0] >= MANY_ROWS and weight.size > LARGE:
        return False
    return shape[2] % 32 == 0 and dtype in (mx.float16, mx.bfloat16) and dtype == weight.dtype


def few_rows_product(x: mx.array, weight: mx.array) -> mx.array:
    """x W^T, summed in float32 and rounded once; it has no gradient.

    Args:
        x: float16 or bfloat16 `[B, 1, D]`, B from 2 to 64 and D a multiple of 32.
        weight: `[N, D]` of x's type.

    Returns:
        `[B, 1, N]` of x's type.
    """
    return _product(x.shape[0])(x, weight)


@lru_cache(maxsize=MAX_ROWS)
def _product(rows: int) -> Any:
    """The product of so many rows, compiled: else the call alone, which writes the kernel's source, costs 7 us of 9.

    One function for each number of rows, as MLX looks for a compiled shape in all that a function was compiled for.
    """

    def product(x: mx.array, weight: mx.array) -> mx.array:
        outputs = weight.shape[0]
        results = _kernel(x.dtype)(
            inputs=[x, weight],
            template=[("T", x.dtype), ("TILES", 1 << ((rows - 1) // 8).bit_length())],
            grid=(32 * WARPS * -(-outputs // OUTPUTS), 1, 1),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[(rows, 1, outputs)],
            output_dtypes=[x.dtype],
        )
        return results[0]

    return mx.compile(product)


@lru_cache(maxsize=2)
def _kernel(dtype: mx.Dtype) -> Any:
    return mx.fast.cuda_kernel(
        name="few_rows_product",
        input_names=["x", "w"],
        output_names=["out"],
        source=SOURCE.replace("KIND", "f16" if dtype == mx.float16 else "bf16"),
    )


# Tensor cores multiply 16 outputs of 16 terms with 8 rows; which terms these are is free, so each thread takes 8 that
# lie side by side. TILES times 8 rows, of which those beyond the last read the last, and 2 times 16 outputs a warp.
SOURCE = """
    const int rows = x_shape[0], N = w_shape[0], K = w_shape[1];
    __shared__ float total[8 * TILES][33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outer = lane / 4, inner = lane % 4;
    const int first = blockIdx.x * 32;

    const T* weights[4];
    for (int i = 0; i < 4; ++i) {
        const int n = first + 8 * i + outer;
        weights[i] = w + static_cast<size_t>(n < N ? n : N - 1) * K;
    }
    float sum[TILES][2][4] = {};
    #pragma unroll 2
    for (int start = 32 * warp; start < K; start += 256) {
        const int k = start + 8 * inner;
        uint4 a[4];
        for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const uint4*>(weights[i] + k);
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int row = 8 * tile + outer;
            const T* values = x + static_cast<size_t>(row < rows ? row : rows - 1) * K;
            const uint4 b = *reinterpret_cast<const uint4*>(values + k);
            for (int half = 0; half < 2; ++half) {
                float* c = sum[tile][half];
                const uint4 low = a[2 * half], high = a[2 * half + 1];
                #define MULTIPLY(A0, A1, A2, A3, B0, B1)                                                     \\
                    asm("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "                               \\
                        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \\
                        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                     \\
                        : "r"(A0), "r"(A1), "r"(A2), "r"(A3), "r"(B0), "r"(B1))
                MULTIPLY(low.x, high.x, low.y, high.y, b.x, b.y);
                MULTIPLY(low.z, high.z, low.w, high.w, b.z, b.w);
            }
        }
    }

    for (int turn = 0; turn < 8; ++turn) {  // one warp after the other, so that the sums are the same every time
        if (turn == warp) {
            for (int tile = 0; tile < TILES; ++tile) {
                for (int i = 0; i < 8; ++i) {
                    float& here = total[8 * tile + 2 * inner + i % 2][16 * (i / 4) + 8 * (i / 2 % 2) + outer];
                    here = (turn == 0 ? 0.f : here) + sum[tile][i / 4][i % 4];
                }
            }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < 32 * rows; i += 256) {
        const int row = i / 32, n = first + i % 32;
        if (n < N) out[static_cast<size_t>(row) * N + n] = static_cast<T>(total[row][i % 32]);
    }
"""
