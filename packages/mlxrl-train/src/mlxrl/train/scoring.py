"""Score the trained tokens of trajectories, a micro-batch of segments at a time."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrl.policy import Scores, score
from mlxrl.rollout import Role, Segment

Segments = Sequence[Segment]


def cut_micro_batches(
    trajectories: Sequence[Segments], rows: Sequence[int], *, max_tokens: int | None, max_rows: int | None
) -> list[list[int]]:
    """Split trajectories into micro-batches: sorted by length, within a budget of padded tokens and of rows.

    A trajectory is never split, so a sequence-level loss sees all of it; one that alone exceeds the budget goes alone.

    Args:
        trajectories: the segments of every trajectory.
        rows: indices of the trajectories to run.
        max_tokens: padded tokens of a micro-batch; None is no limit.
        max_rows: segments of a micro-batch; None is no limit.

    Returns:
        Lists of indices; each index of `rows` once.
    """

    def width(row: int) -> int:
        return max(len(segment.token_ids) for segment in trajectories[row])

    cuts: list[list[int]] = []
    for row in sorted((row for row in rows if trajectories[row]), key=width, reverse=True):
        if cuts:
            together = [*cuts[-1], row]
            segments = sum(len(trajectories[i]) for i in together)
            tokens = segments * width(together[0])  # sorted: the first is the longest
            if (max_tokens is None or tokens <= max_tokens) and (max_rows is None or segments <= max_rows):
                cuts[-1] = together
                continue
        cuts.append([row])
    return cuts


def score_micro_batch(
    model: nn.Module, trajectories: Sequence[Segments], width: int, *, temperature: float, pad_token_id: int
) -> Scores:
    """Log-probabilities and entropies of the trained tokens of a few trajectories.

    ACTION tokens are scored at the sampling temperature, ECHO tokens at 1.

    Args:
        model: the policy.
        trajectories: b trajectories' segments.
        width: T of the result.
        temperature: sampling temperature.
        pad_token_id: id that fills rows.

    Returns:
        Scores `[b, T]`: a trajectory's trained tokens end to end, 0 behind them.
    """
    segments = [segment for parts in trajectories for segment in parts]
    length = max(len(segment.token_ids) for segment in segments)
    token_ids_R_L = np.full((len(segments), length), pad_token_id, dtype=np.int32)
    roles_R_L = np.zeros((len(segments), length), dtype=np.int8)
    for row, segment in enumerate(segments):
        token_ids_R_L[row, : len(segment.token_ids)] = segment.token_ids
        roles_R_L[row, : len(segment.roles)] = segment.roles
    temperature_R_L = np.where(roles_R_L == Role.ECHO, 1.0, temperature)
    scores = score(model, token_ids_R_L, roles_R_L != Role.MASKED, temperature=temperature_R_L)

    places_b_T = np.zeros((len(trajectories), width), dtype=np.int32)  # place 0 is never scored: its value is 0
    row = 0
    for i, parts in enumerate(trajectories):
        filled = 0
        for segment in parts:
            columns = np.flatnonzero(segment.roles != Role.MASKED)
            places_b_T[i, filled : filled + len(columns)] = row * length + columns
            filled += len(columns)
            row += 1
    return Scores(*(values.reshape(-1)[mx.array(places_b_T)] for values in scores))


def score_trajectories(
    model: nn.Module,
    trajectories: Sequence[Segments],
    roles_B_T: mx.array,
    *,
    temperature: float,
    pad_token_id: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> mx.array:
    """Log-probabilities of all trained tokens, without a gradient: the old or the reference forward pass.

    Returns:
        float32 `[B, T]`, laid out as `roles_B_T`.
    """
    width = roles_B_T.shape[1]
    logprobs_B_T = mx.zeros(roles_B_T.shape)
    for rows in cut_micro_batches(trajectories, range(len(trajectories)), max_tokens=max_tokens, max_rows=max_rows):
        parts = [trajectories[row] for row in rows]
        scores = score_micro_batch(model, parts, width, temperature=temperature, pad_token_id=pad_token_id)
        logprobs_B_T[mx.array(rows)] = mx.stop_gradient(scores.logprobs)
        mx.eval(logprobs_B_T)  # one micro-batch's activations at a time
    return logprobs_B_T
