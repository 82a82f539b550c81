"""Returns to go and whitening over the tokens of a batch, on the host in float64."""

from collections.abc import Sequence

import mlx.core as mx

from mlxrl.algo.advantages import is_constant, mean, standard_deviation


def discounted_returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Return the return to go of each step.

    R_k = r_k + gamma R_{k+1}, with nothing after the last. Source: Sutton and Barto, equation 3.9.

    Args:
        rewards: of the steps (turns or tokens) of one trajectory.
        gamma: discount per step.

    Returns:
        As many returns.
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def reinforcepp_returns(
    rewards: Sequence[float | None], token_kls: Sequence[Sequence[float]], beta: float
) -> list[list[float]]:
    """Return the return to go of every action token, with the KL charged token by token.

    R_t = r - beta sum_{s >= t} k1_s over the action tokens s; the reward r comes at the last of them, and tokens in
    between that are no actions carry the return along. Source: REINFORCE++, arXiv 2501.03262.

    Args:
        rewards: [B]; None abstains.
        token_kls: [B][n_i], k1 of each action token, nats.
        beta: weight of the KL, reward per nat.

    Returns:
        [B][n_i]; an empty row for one that abstains.
    """
    returns: list[list[float]] = []
    for reward, row in zip(rewards, token_kls, strict=True):
        token_rewards = [-beta * kl for kl in row]
        if reward is None or not row:
            returns.append([])
            continue
        token_rewards[-1] += reward
        returns.append(discounted_returns(token_rewards))
    return returns


def whitened(values: Sequence[Sequence[float]], eps: float = 1e-6) -> list[list[float]]:
    """Return values with mean 0 and standard deviation 1 over all tokens of the batch.

    (x - mean) / (std + eps), both over every token; equal values give exactly 0. Source: REINFORCE++,
    arXiv 2501.03262.

    Args:
        values: [B][n_i], rows of any lengths.
        eps: added to the standard deviation.

    Returns:
        [B][n_i].
    """
    pooled = [value for row in values for value in row]
    if is_constant(pooled):
        return [[0.0] * len(row) for row in values]
    centre, scale = mean(pooled), standard_deviation(pooled) + eps
    return [[(value - centre) / scale for value in row] for row in values]


def paint_tokens(values: Sequence[Sequence[float]], mask: mx.array) -> mx.array:
    """Return values in their places among the tokens.

    Args:
        values: [B][n_i], one per action token in order; an empty row leaves its tokens 0.
        mask: [B, T], non-zero at action tokens.

    Returns:
        float32 [B, T], 0 elsewhere.
    """
    flags: list[list[float]] = mask.tolist()  # pyright: ignore
    painted: list[list[float]] = []
    for row, row_flags in zip(values, flags, strict=True):
        remaining = iter(row)
        painted.append([next(remaining, 0.0) if flag else 0.0 for flag in row_flags])
    return mx.array(painted, dtype=mx.float32)
