"""Surrogate losses per token: arrays in, an array of the same shape out, neither masked nor reduced.

Each is minimised. The ratio carries the gradient; advantages are constants.
"""

import mlx.core as mx


def is_clipped(ratio: mx.array, advantages: mx.array, clip_low: float | None, clip_high: float | None) -> mx.array:
    """Say where the clipped surrogate is flat: the token has moved past the bound its advantage pushes it to.

    (A > 0 and rho > 1 + clip_high) or (A < 0 and rho < 1 - clip_low).

    Args:
        ratio: [B, T].
        advantages: [B, T].
        clip_low: distance of the lower bound from 1; None leaves that side open.
        clip_high: distance of the upper bound from 1; None leaves that side open.

    Returns:
        bool [B, T].
    """
    clipped = mx.zeros(mx.broadcast_shapes(ratio.shape, advantages.shape), dtype=mx.bool_)
    if clip_high is not None:
        clipped = clipped | ((advantages > 0) & (ratio > 1 + clip_high))
    if clip_low is not None:
        clipped = clipped | ((advantages < 0) & (ratio < 1 - clip_low))
    return clipped


def unclipped_surrogate(ratio: mx.array, advantages: mx.array) -> mx.array:
    """Return -rho A, whose on-policy gradient is that of REINFORCE.

    Source: importance-weighted policy gradient; arXiv 2402.14740 (RLOO), equation 1.

    Args:
        ratio: [B, T].
        advantages: [B, T].

    Returns:
        [B, T].
    """
    return -ratio * advantages


def clipped_surrogate(
    ratio: mx.array, advantages: mx.array, *, clip_low: float | None, clip_high: float | None
) -> mx.array:
    """Return the pessimistic surrogate of PPO, with separate bounds below and above.

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). Source: arXiv 1707.06347, equation 7; separate bounds:
    DAPO, arXiv 2503.14476, equation 10.

    Args:
        ratio: [B, T].
        advantages: [B, T].
        clip_low: distance of the lower bound from 1; None leaves that side open.
        clip_high: distance of the upper bound from 1; None leaves that side open.

    Returns:
        [B, T]; the gradient is exactly 0 where `is_clipped` holds.
    """
    # The minimum takes the bound exactly where is_clipped holds: 1 + clip_high if A > 0, 1 - clip_low if A < 0.
    upper, lower = 1 + (clip_high or 0.0), 1 - (clip_low or 0.0)
    bound = mx.where(advantages > 0, upper, lower)
    bounded = mx.where(is_clipped(ratio, advantages, clip_low, clip_high), bound, ratio)
    return -bounded * advantages
