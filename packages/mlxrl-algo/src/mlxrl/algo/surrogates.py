"""Surrogate losses per token: arrays in, an array of the same shape out, neither masked nor reduced.

Each is minimised. The ratio carries the gradient; advantages are constants.
"""

import mlx.core as mx

from mlxrl.algo._arrays import clamped_exp, keep, row_mean


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

    Source: importance-weighted policy gradient; RLOO, arXiv 2402.14740.

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
    bounded = ratio
    if clip_high is not None:
        bounded = mx.where((advantages > 0) & (ratio > 1 + clip_high), 1 + clip_high, bounded)
    if clip_low is not None:
        bounded = mx.where((advantages < 0) & (ratio < 1 - clip_low), 1 - clip_low, bounded)
    return -bounded * advantages


def cispo_surrogate(ratio: mx.array, advantages: mx.array, logp: mx.array, *, cap: float) -> mx.array:
    """Return REINFORCE with a truncated importance weight, which no token's gradient escapes.

    -stop_gradient(min(rho, cap)) A log pi. Source: CISPO, arXiv 2506.13585, equation 4; the absolute cap is that of
    ScaleRL, arXiv 2510.13786.

    Args:
        ratio: [B, T].
        advantages: [B, T].
        logp: [B, T], nats, of the current policy; the only argument with a gradient.
        cap: the largest weight.

    Returns:
        [B, T].
    """
    return -mx.stop_gradient(mx.minimum(ratio, cap)) * advantages * logp


def sapo_surrogate(
    ratio: mx.array, advantages: mx.array, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> mx.array:
    """Return the surrogate with a smooth gate in place of the clip.

    -(4 / tau) sigmoid(tau (rho - 1)) A with tau by the sign of A; at rho = 1 its slope is that of -rho A.
    Source: SAPO, arXiv 2511.20347.

    Args:
        ratio: [B, T].
        advantages: [B, T].
        tau_positive: temperature where A > 0; the gate narrows as it grows.
        tau_negative: temperature elsewhere.

    Returns:
        [B, T].
    """

    def gate(tau: float) -> mx.array:
        return (2 / tau) * (1 + mx.tanh(tau * (ratio - 1) / 2))  # (4 / tau) sigmoid, exact in float64 too

    return -mx.where(advantages > 0, gate(tau_positive), gate(tau_negative)) * advantages


def gmpo_surrogate(
    log_ratio: mx.array, advantages: mx.array, mask: mx.array, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> mx.array:
    """Return the surrogate of the geometric mean of clipped token ratios, at each of the trajectory's tokens.

    -A exp(mean_t c), c = min(d, clip_high) if A > 0, max(d, -clip_low) if A < 0, d = log pi - log old; exp's argument
    is clamped to [-20, 20] after the mean. Source: GMPO, arXiv 2507.20673.

    Args:
        log_ratio: [B, T], d, nats, 0 at masked positions.
        advantages: [B, T].
        mask: [B, T], non-zero at action tokens.
        clip_low: distance of the lower bound of d from 0, nats.
        clip_high: distance of the upper bound of d from 0, nats.

    Returns:
        [B, T].
    """
    upper = mx.where((advantages > 0) & (log_ratio > clip_high), clip_high, log_ratio)
    clipped = mx.where((advantages < 0) & (log_ratio < -clip_low), -clip_low, upper)
    return -advantages * clamped_exp(row_mean(keep(clipped, mask), mask))
