"""Rewards shaped before advantages are taken: a KL charged inside the reward, a penalty on overlong answers."""

import math
from collections.abc import Sequence

import mlx.core as mx

from mlxrl.algo.batch import AlgorithmBatch


def action_values(array: mx.array, mask: mx.array) -> list[list[float]]:
    """Return the entries at each row's action tokens, in order, on the host.

    Args:
        array: [B, T].
        mask: [B, T], non-zero at action tokens.

    Returns:
        [B][n_i].
    """
    values: list[list[float]] = array.tolist()  # pyright: ignore
    flags: list[list[float]] = mask.tolist()  # pyright: ignore
    return [
        [value for value, flag in zip(row, row_flags, strict=True) if flag]
        for row, row_flags in zip(values, flags, strict=True)
    ]


def token_kl(batch: AlgorithmBatch) -> list[list[float]]:
    """Return k1 = log old - log ref of each action token, a constant for the loss.

    Args:
        batch: with `old_logprobs` and `reference_logprobs`.

    Returns:
        [B][n_i], nats.

    Raises:
        ValueError: either of the two log-probs is missing.
    """
    old, ref = batch.old_logprobs, batch.reference_logprobs
    if old is None or ref is None:
        missing = "old_logprobs" if old is None else "reference_logprobs"
        raise ValueError(f"{missing} must be given for a KL inside the reward, got None")
    mask = batch.action_mask
    return [
        [a - b for a, b in zip(old_row, ref_row, strict=True)]
        for old_row, ref_row in zip(action_values(old, mask), action_values(ref, mask), strict=True)
    ]


def charge_kl(rewards: Sequence[float | None], token_kls: Sequence[Sequence[float]], beta: float) -> list[float | None]:
    """Return the rewards less the KL of the whole trajectory; one whose KL is not finite abstains.

    r'_i = r_i - beta sum_t (log pi - log ref). Source: RLOO, arXiv 2402.14740.

    Args:
        rewards: [B]; None abstains.
        token_kls: [B][n_i], k1 of each action token, nats.
        beta: weight of the KL, reward per nat.

    Returns:
        [B].
    """
    return [
        reward - beta * math.fsum(row) if reward is not None and all(map(math.isfinite, row)) else None
        for reward, row in zip(rewards, token_kls, strict=True)
    ]


def soft_overlong_penalties(lengths: Sequence[int], *, max_length: int, buffer: int) -> list[float]:
    """Return a penalty that grows over the last `buffer` tokens before the limit.

    0 up to L - b, (L - b - n) / b up to L, -1 beyond, with L `max_length` and b `buffer`.
    Source: DAPO, arXiv 2503.14476, equation 13.

    Args:
        lengths: [B], action tokens n of each trajectory.
        max_length: L, tokens.
        buffer: b, tokens, from 1 to L.

    Returns:
        [B], each in [-1, 0], to be added to the reward.

    Raises:
        ValueError: the buffer is not between 1 and max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be between 1 and max_length {max_length}, got {buffer}")
    return [-min(1.0, max(0.0, (length - (max_length - buffer)) / buffer)) for length in lengths]
