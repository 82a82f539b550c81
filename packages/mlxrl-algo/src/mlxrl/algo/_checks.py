"""Checks at the public doors: what must hold, then what came."""

import math
from collections.abc import Sequence

import mlx.core as mx


def check_rank(name: str, array: mx.array, rank: int) -> None:
    """Raise ValueError unless `array` has `rank` axes."""
    if array.ndim != rank:
        raise ValueError(f"{name} must have rank {rank}, got rank {array.ndim} with shape {array.shape}")


def check_shape(name: str, array: mx.array, shape: tuple[int, ...], like: str) -> None:
    """Raise ValueError unless `array` has the shape of the argument called `like`."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape of {like}, {tuple(shape)}, got {tuple(array.shape)}")


def check_length(name: str, values: Sequence[object], length: int, like: str) -> None:
    """Raise ValueError unless `values` has one entry for each of the `length` rows of `like`."""
    if len(values) != length:
        raise ValueError(f"{name} must have one entry per row of {like}, {length}, got {len(values)}")


def check_finite(name: str, value: float, row: int) -> None:
    """Raise ValueError when a number given for `row` is NaN or infinite."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite (None abstains), got {value} in row {row}")
