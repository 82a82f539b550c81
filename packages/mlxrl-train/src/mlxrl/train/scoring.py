"""Score the trained tokens of trajectories, a micro-batch of segments at a time."""

from collections.abc import Sequence
from itertools import groupby
from numbers import Integral
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxrl.policy import Scores, plan_reading, score, shares_prefixes
from mlxrl.policy.shared_prefix import WORTHWHILE
from mlxrl.rollout import Role, Segment

Segments = Sequence[Segment]

# One more micro-batch costs about as much as so many more tokens: its passes are traced and launched all the same.
MICRO_BATCH_TOKENS = 256


def rows_with(tokens_B_T: mx.array) -> list[int]:
    """Indices of the trajectories that have one of the tokens, bool `[B, T]`."""
    has_one = cast(list[bool], tokens_B_T.any(axis=1).tolist())
    return [row for row, found in enumerate(has_one) if found]


def cut_micro_batches(
    trajectories: Sequence[Segments], rows: Sequence[int], *, max_tokens: int | None, max_rows: int | None, share: bool
) -> list[list[int]]:
    """Split trajectories into micro-batches within a budget of padded tokens and of rows.

    They are sorted by length, or those of one prompt stand together, longest prompt first: whichever leaves the model
    fewer tokens to read. Prompts share a micro-batch unless apart they save a fifth of its tokens and more than a
    micro-batch costs. A trajectory is never split, so a sequence-level loss sees all of it; one that alone exceeds the
    budget goes alone.

    Args:
        trajectories: the segments of every trajectory.
        rows: indices of the trajectories to run.
        max_tokens: padded tokens of a micro-batch, those that its rows share counted once; None is no limit.
        max_rows: segments of a micro-batch that are read; None is no limit.
        share: whether the model reads what rows share once, see `mlxrl.policy.shares_prefixes`.

    Returns:
        Lists of indices; each index of `rows` once.

    Raises:
        ValueError: a limit is no whole number from 1 on.
    """
    check_limit("max_tokens", max_tokens)
    check_limit("max_rows", max_rows)
    read = {row: _read(trajectories[row]) for row in rows if trajectories[row]}

    def width(row: int) -> int:
        return max((len(part) for part in read[row]), default=0)

    def prompt(row: int) -> tuple[int, bytes]:
        segment = trajectories[row][0]
        start = int(np.argmax(segment.roles != Role.MASKED))
        return start, segment.token_ids[:start].tobytes()

    def tokens(cut: list[int]) -> int:
        parts = [part for row in cut for part in read[row]]
        return plan_reading(parts, share=share).tokens if parts else 0

    def fits(cut: list[int]) -> bool:
        segments = sum(len(read[row]) for row in cut)
        return (max_rows is None or segments <= max_rows) and (max_tokens is None or tokens(cut) <= max_tokens)

    def filled(order: list[int]) -> list[list[int]]:
        cuts: list[list[int]] = []
        for row in order:
            if cuts and fits([*cuts[-1], row]):
                cuts[-1].append(row)
            else:
                cuts.append([row])
        return cuts

    order = sorted(read, key=width, reverse=True)
    by_length = filled(order)
    if not share:
        return by_length
    by_prompt: list[list[int]] = []
    for _, same in groupby(sorted(order, key=prompt, reverse=True), key=prompt):
        group = list(same)
        if by_prompt:
            together, apart = [*by_prompt[-1], *group], tokens(by_prompt[-1]) + tokens(group)
            if apart + MICRO_BATCH_TOKENS > WORTHWHILE * tokens(together) and fits(together):
                by_prompt[-1] = together
                continue
        by_prompt += filled(group)
    return min(by_length, by_prompt, key=lambda cuts: sum(map(tokens, cuts)))


def check_limit(name: str, value: int | None) -> None:
    """Raise ValueError where a limit of a micro-batch is neither None nor a whole number from 1 on."""
    if value is not None and (not isinstance(value, Integral) or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, or None for no limit, got {value!r}.")


def _read(segments: Segments) -> list[npt.NDArray[np.integer[Any]]]:
    """What the model reads to score segments: of each that has a trained token all before its last."""
    trained = [np.flatnonzero(segment.roles != Role.MASKED) for segment in segments]
    return [segment.token_ids[: at[-1]] for segment, at in zip(segments, trained, strict=True) if at.size]


def score_micro_batch(
    model: nn.Module,
    trajectories: Sequence[Segments],
    width: int,
    *,
    temperature: float,
    pad_token_id: int,
    with_gradient: bool = False,
) -> Scores:
    """Log-probabilities and entropies of the trained tokens of a few trajectories.

    ACTION tokens are scored at the sampling temperature, ECHO tokens at 1.

    Args:
        model: the policy.
        trajectories: b trajectories' segments.
        width: T of the result.
        temperature: sampling temperature.
        pad_token_id: id that fills rows.
        with_gradient: whether a gradient will be taken.

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
    scores = score(
        model, token_ids_R_L, roles_R_L != Role.MASKED, temperature=temperature_R_L, with_gradient=with_gradient
    )

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
    rows: Sequence[int],
    temperature: float,
    pad_token_id: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> tuple[mx.array, int]:
    """Log-probabilities of the trained tokens of some rows, without a gradient: the old or the reference forward pass.

    Returns:
        float32 `[B, T]`, laid out as `roles_B_T`, 0 in other rows; and the number of micro-batches that it took.
    """
    width = roles_B_T.shape[1]
    logprobs_B_T = mx.zeros(roles_B_T.shape)
    share = shares_prefixes(model)
    cuts = cut_micro_batches(trajectories, rows, max_tokens=max_tokens, max_rows=max_rows, share=share)
    for cut in cuts:
        parts = [trajectories[row] for row in cut]
        scores = score_micro_batch(model, parts, width, temperature=temperature, pad_token_id=pad_token_id)
        logprobs_B_T[mx.array(cut)] = mx.stop_gradient(scores.logprobs)
        mx.eval(logprobs_B_T)  # one micro-batch's activations at a time
    return logprobs_B_T, len(cuts)
