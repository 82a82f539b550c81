"""Importance ratios of the current policy to the policy the batch was scored with.

d[i, t] = log pi - log old at action tokens, 0 elsewhere; n_i action tokens in row i. With `old` None the old policy is
the current one: d = log pi - stop_gradient(log pi), so that every ratio is exactly 1 and its gradient that of log pi.
"""

import mlx.core as mx

from mlxrl.algo._arrays import clamped_exp, keep, row_mean
from mlxrl.algo._checks import check_rank, check_shape


def log_ratio(logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
    """Return log pi - log old at action tokens and 0 elsewhere.

    Args:
        logp: [B, T], nats, of the current policy.
        old: [B, T], nats, or None for the current policy itself.
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B, T] in at least float32.

    Raises:
        ValueError: the shapes differ.
    """
    check_rank("logp", logp, 2)
    check_shape("mask", mask, logp.shape, "logp")
    kept = keep(logp, mask)
    if old is None:
        return kept - mx.stop_gradient(kept)
    check_shape("old", old, logp.shape, "logp")
    return kept - keep(old, mask)


def token_ratio(logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
    """Return the ratio of each token.

    rho[i, t] = exp(clip(d[i, t], -20, 20)). Source: PPO, arXiv 1707.06347, section 3.

    Args:
        logp: [B, T], nats.
        old: [B, T], nats, or None for on-policy.
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B, T]; 1 at masked positions.

    Raises:
        ValueError: the shapes differ.
    """
    return clamped_exp(log_ratio(logp, old, mask))


def sequence_ratio(logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
    """Return the ratio of the whole trajectory, the product over its tokens, at each of its tokens.

    P_i = exp(clip(sum_t d[i, t], -20, 20)). Source: importance sampling of the trajectory.

    Args:
        logp: [B, T], nats.
        old: [B, T], nats, or None for on-policy.
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B, T], constant along a row.

    Raises:
        ValueError: the shapes differ.
    """
    d = log_ratio(logp, old, mask)
    return mx.broadcast_to(clamped_exp(mx.sum(d, axis=1, keepdims=True)), d.shape)


def geometric_ratio(logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
    """Return the length-normalised ratio of the trajectory at each of its tokens.

    s_i = exp(clip((1 / n_i) sum_t d[i, t], -20, 20)). Source: GSPO, arXiv 2507.18071, equation 7.

    Args:
        logp: [B, T], nats.
        old: [B, T], nats, or None for on-policy.
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B, T], constant along a row.

    Raises:
        ValueError: the shapes differ.
    """
    d = log_ratio(logp, old, mask)
    return mx.broadcast_to(clamped_exp(row_mean(d, mask)), d.shape)


def geometric_token_ratio(logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
    """Return the trajectory's ratio as a constant times a token ratio that is 1 but has the token's gradient.

    s[i, t] = stop_gradient(s_i) * pi[i, t] / stop_gradient(pi[i, t]).
    Source: GSPO-token, arXiv 2507.18071, equation 14.

    Args:
        logp: [B, T], nats.
        old: [B, T], nats, or None for on-policy.
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B, T] with the value of `geometric_ratio`.

    Raises:
        ValueError: the shapes differ.
    """
    return mx.stop_gradient(geometric_ratio(logp, old, mask)) * token_ratio(logp, None, mask)
