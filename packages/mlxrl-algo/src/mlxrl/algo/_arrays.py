"""Array helpers shared by every loss: promotion of dtypes and masking before arithmetic."""

from collections.abc import Sequence

import mlx.core as mx

EXP_LIMIT = 20.0
"""exp's argument is clamped to [-20, 20]: e^20 = 4.9e8 is far beyond any useful ratio and far from overflow."""


def promote(array: mx.array) -> mx.array:
    """Return bf16 and f16 arrays in float32; float32 and float64 stay what they are.

    Args:
        array: any shape, floating point.

    Returns:
        The array in at least float32.
    """
    return array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array


def keep(array: mx.array, mask: mx.array) -> mx.array:
    """Return `array` promoted, with 0 wherever the mask is 0, whatever stood there (NaN and inf included).

    Args:
        array: any shape that broadcasts with the mask.
        mask: [B, T], non-zero at the tokens that count.

    Returns:
        The broadcast shape; the gradient at masked positions is exactly 0.
    """
    return mx.where(mask != 0, promote(array), 0.0)


def clamped_exp(array: mx.array) -> mx.array:
    """Return exp(clip(x, -20, 20)), finite with a finite gradient for every finite x."""
    clipped = mx.clip(array, -EXP_LIMIT, EXP_LIMIT)
    # MLX rounds exp through float32 even for float64 (0.32.4); expm1 keeps the precision that finite differences need.
    return mx.expm1(clipped) + 1 if clipped.dtype == mx.float64 else mx.exp(clipped)


def row_mean(array: mx.array, mask: mx.array) -> mx.array:
    """Return the mean over each row's counted tokens as [B, 1]; a row without any gives 0.

    Args:
        array: [B, T], already 0 at masked positions.
        mask: [B, T].
    """
    count_B_1 = mx.maximum(mx.sum(mask != 0, axis=1, keepdims=True), 1)
    return mx.sum(array, axis=1, keepdims=True) / count_B_1.astype(array.dtype)


def paint(row_values: Sequence[float], mask: mx.array) -> mx.array:
    """Return float32 [B, T] with each row's value at its counted tokens and exactly 0 elsewhere.

    Args:
        row_values: [B].
        mask: [B, T].
    """
    return mx.where(mask != 0, mx.array(list(row_values), dtype=mx.float32)[:, None], 0.0)
