"""Reductions as weights: the loss of an optimizer batch is sum(w * l), with w from the whole batch.

The weights are computed before any split into micro-batches, so that sums over any split add up to the whole batch's
loss and gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlxrl.algo._checks import check_length, check_rank, check_shape
from mlxrl.algo.batch import Role

REDUCTIONS = {
    "token_mean": "sum l m / N",
    "sequence_mean": "(1/B) sum_i (1/n_i) sum_t l m",
    "step_mean": "(1/K) sum_k (1/n_k) sum_t l m",
    "sequence_max_tokens": "(1/B) sum_i (1/L) sum_t l m",
    "sequence_sum": "(1/B) sum_i sum_t l m",
}
"""The reductions and their formulas: m the action mask, n tokens of a trajectory i or turn k, N tokens, B trajectories
and K turns of the batch, each counted only where it has an action token, L the configured constant."""


@dataclass(frozen=True)
class Reduction:
    """How token losses become one loss: a name of `REDUCTIONS` and, for sequence_max_tokens, its constant L.

    Attributes:
        name: a key of `REDUCTIONS`.
        max_tokens: L in tokens, at least 1; only for sequence_max_tokens, where None means not known yet.
    """

    name: str
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.name not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.name!r}")
        if self.max_tokens is not None and self.name != "sequence_max_tokens":
            raise ValueError(
                f"max_tokens has no effect on reduction {self.name!r}, got {self.max_tokens}; "
                "leave it out or choose sequence_max_tokens"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


TOKEN_MEAN = Reduction("token_mean")
SEQUENCE_MEAN = Reduction("sequence_mean")
STEP_MEAN = Reduction("step_mean")
SEQUENCE_MAX_TOKENS = Reduction("sequence_max_tokens")
SEQUENCE_SUM = Reduction("sequence_sum")


class ReductionTotals(NamedTuple):
    """What a batch is divided by; totals of several ranks are summed field by field.

    Attributes:
        tokens: N, action tokens.
        sequences: B, valid trajectories with an action token.
        steps: K, turns of those trajectories with an action token.
    """

    tokens: int
    sequences: int
    steps: int


def reduction_totals(
    roles: mx.array, turns: mx.array | None = None, valid: Sequence[bool] | None = None
) -> ReductionTotals:
    """Return the counts that `reduction_weights` divides by.

    Args:
        roles: [B, T], roles or an action mask: 1 at action tokens.
        turns: int [B, T], the turn of each token; None counts each trajectory as one turn.
        valid: [B]; False leaves a row out of every count. None keeps all.

    Returns:
        The totals of these rows.

    Raises:
        ValueError: the shapes differ.
    """
    mask = _counted(roles, valid)
    lengths = [int(length) for length in _host(mx.sum(mask, axis=1))]
    steps = _turn_lengths(mask, turns)
    return ReductionTotals(
        tokens=sum(lengths),
        sequences=sum(length > 0 for length in lengths),
        steps=sum(length > 0 for row in steps for length in row),
    )


def reduction_weights(
    reduction: Reduction | str,
    roles: mx.array,
    turns: mx.array | None = None,
    valid: Sequence[bool] | None = None,
    *,
    totals: ReductionTotals | None = None,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Return the weights w with loss = sum(w * l) over the batch.

    token_mean 1/N; sequence_mean 1/(B n_i); step_mean 1/(K n_k); sequence_max_tokens 1/(B L); sequence_sum 1/B, each
    at action tokens of valid rows and 0 elsewhere. Source: `REDUCTIONS`; L is that of Dr. GRPO, arXiv 2503.20783.

    Args:
        reduction: a `Reduction`, or the name of one that needs no constant.
        roles: [B, T], roles or an action mask: 1 at action tokens.
        turns: int [B, T], the turn of each token; needed by step_mean alone.
        valid: [B]; False for rows that failed or abstained. They leave B and N; rows with advantage 0 stay.
        totals: denominators to use instead of this batch's own, for instance summed over ranks.
        dtype: of the weights.

    Returns:
        [B, T].

    Raises:
        ValueError: sequence_max_tokens without its constant, step_mean without turns, or shapes that differ.
    """
    reduction = Reduction(reduction) if isinstance(reduction, str) else reduction
    if reduction.name == "step_mean" and turns is None:
        raise ValueError("turns must be given for reduction 'step_mean', got None")
    if reduction.name == "sequence_max_tokens" and reduction.max_tokens is None:
        raise ValueError("max_tokens must be set for reduction 'sequence_max_tokens', got None")
    mask = _counted(roles, valid)
    whole = reduction_totals(roles, turns, valid) if totals is None else totals
    if reduction.name == "step_mean" and turns is not None:
        weights_B_K = [[1 / (whole.steps * n) if n else 0.0 for n in row] for row in _turn_lengths(mask, turns)]
        turns_B_T = mx.where(mask, turns, 0)
        weights_B_T = mx.take_along_axis(mx.array(weights_B_K, dtype=dtype), turns_B_T, axis=1)
    else:
        rows = [_row_weight(reduction, int(n), whole) if n else 0.0 for n in _host(mx.sum(mask, axis=1))]
        weights_B_T = mx.array(rows, dtype=dtype)[:, None]
    return mx.where(mask, weights_B_T, mx.zeros_like(weights_B_T))


def _row_weight(reduction: Reduction, length: int, totals: ReductionTotals) -> float:
    """Return the weight of each action token of a row that has `length` of them."""
    if reduction.name == "token_mean":
        return 1 / totals.tokens
    divisor = {"sequence_mean": length, "sequence_max_tokens": reduction.max_tokens or 1, "sequence_sum": 1}
    return 1 / (totals.sequences * divisor[reduction.name])


def _counted(roles: mx.array, valid: Sequence[bool] | None) -> mx.array:
    """Return bool [B, T], True at the action tokens of valid rows."""
    check_rank("roles", roles, 2)
    mask = roles == int(Role.ACTION)
    if valid is None:
        return mask
    check_length("valid", valid, roles.shape[0], "roles")
    return mask & mx.array(list(valid), dtype=mx.bool_)[:, None]


def _turn_lengths(mask: mx.array, turns: mx.array | None) -> list[list[int]]:
    """Return the number of counted tokens of every turn of every row, [B][K]."""
    if turns is None:
        return [[int(length)] for length in _host(mx.sum(mask, axis=1))]
    check_shape("turns", turns, mask.shape, "roles")
    turns_B_T = mx.where(mask, turns, -1)
    count = max(1, int(mx.max(turns_B_T)) + 1)
    lengths_B_K = mx.stack([mx.sum(turns_B_T == turn, axis=1) for turn in range(count)], axis=1)
    return [[int(length) for length in row] for row in lengths_B_K.tolist()]  # pyright: ignore


def _host(array: mx.array) -> list[float]:
    """Bring one number per row to the host, where denominators are exact integers."""
    return array.tolist()  # pyright: ignore
