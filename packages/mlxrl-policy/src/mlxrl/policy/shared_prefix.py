"""Rows that begin alike: the trunk reads what they share once, and each row goes on from there.

A batch is read in at most two passes. The first reads `depth` tokens of every *stem*, a distinct beginning; the second
the rest of every *tail*, a row that is longer, from caches that a gradient flows through. One depth for all rows keeps
the passes few and large; it is the one that leaves the trunk the fewest tokens, padding included.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxrl.policy.checkpointing import draws_dropout
from mlxrl.policy.gradient_caches import gradient_caches, spread
from mlxrl.policy.head import Trunk, blocks_of, split_head
from mlxrl.policy.under_gradient import under_gradient

# Two passes cost more than one of as many tokens: rows share where that leaves at most this part of them.
WORTHWHILE = 0.8

Rows = Sequence[npt.NDArray[np.integer[Any]]]


class Reading(NamedTuple):
    """How a batch is read.

    Args:
        depth: tokens of the first pass.
        width: tokens of the longest row.
        stems: per distinct beginning, a row that has it.
        stem_of: per row, its place in `stems`.
        tails: rows longer than `depth`, ordered by their stems.
    """

    depth: int
    width: int
    stems: list[int]
    stem_of: list[int]
    tails: list[int]

    @property
    def tokens(self) -> int:
        """Tokens the trunk runs, padding included."""
        return len(self.stems) * self.depth + len(self.tails) * (self.width - self.depth)


def plan_reading(rows: Rows, *, share: bool = True) -> Reading:
    """The passes that read these rows with the fewest tokens.

    Args:
        rows: token ids of each row; one row at least, of one token at least.
        share: whether rows may share their beginnings; if not, every row is read whole, in one pass.
    """
    width = max(len(row) for row in rows)
    plain = Reading(width, width, list(range(len(rows))), list(range(len(rows))), [])
    if not share or len(rows) == 1:
        return plain
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">u4").tobytes())  # alike stand side by side
    common = np.array([_common(rows[one], rows[other]) for one, other in pairwise(order)])
    lengths = np.array([len(row) for row in rows])
    depths_K = np.unique(np.concatenate([common, lengths]))  # between these the count of tokens is linear
    depths_K = depths_K[depths_K > 0]
    stems_K = 1 + (common < depths_K[:, None]).sum(axis=1)
    tails_K = (lengths > depths_K[:, None]).sum(axis=1)
    tokens_K = stems_K * depths_K + tails_K * (width - depths_K)
    best = int(tokens_K.argmin())
    if tokens_K[best] > WORTHWHILE * plain.tokens:
        return plain
    depth = int(depths_K[best])
    new_stem = np.concatenate([[True], common < depth])
    stem_of = np.empty(len(rows), dtype=int)
    stem_of[order] = np.cumsum(new_stem) - 1
    stems = [row for row, new in zip(order, new_stem, strict=True) if new]
    return Reading(depth, width, stems, stem_of.tolist(), [row for row in order if lengths[row] > depth])


def read(model: nn.Module, trunk: Trunk, rows: Rows, reading: Reading) -> tuple[mx.array, npt.NDArray[np.integer[Any]]]:
    """The hidden states of rows of tokens.

    Args:
        model: whose blocks the trunk has.
        trunk: token ids to hidden states.
        rows: token ids of each row.
        reading: from `plan_reading(rows)`.

    Returns:
        Hidden states `[H, D]` and the places of the rows' tokens among them, int `[R, width]`.
    """
    depth, width = reading.depth, reading.width
    padded = np.zeros((len(rows), width), dtype=np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    stems_N_P = mx.array(padded[reading.stems, :depth])
    places_R_W = np.array(reading.stem_of)[:, None] * depth + np.arange(width)
    with under_gradient(model):
        if not reading.tails:
            return trunk(stems_N_P).flatten(0, 1), places_R_W
        caches: Any = gradient_caches(model)
        stems_H_D = trunk(stems_N_P, cache=caches).flatten(0, 1)
        tails_of_N = np.bincount([reading.stem_of[row] for row in reading.tails], minlength=len(reading.stems))
        forks = [spread(cache, tails_of_N.tolist()) for cache in caches]
        tails_H_D = trunk(mx.array(padded[reading.tails, depth:]), cache=forks).flatten(0, 1)
    behind = np.arange(len(reading.tails) * (width - depth)) + stems_H_D.shape[0]
    places_R_W[reading.tails, depth:] = behind.reshape(-1, width - depth)
    return mx.concatenate([stems_H_D, tails_H_D]), places_R_W


def shares_prefixes(model: nn.Module) -> bool:
    """Whether rows of `model` may share what they begin with: its caches allow it, and no dropout acts.

    On the first call for a model, and again once its blocks are checkpointed or no longer are, its hidden states over a
    few tokens, read in two passes, are compared with those of whole rows. Dropout draws masks for each row, which rows
    that share could not have.

    Args:
        model: an mlx-lm causal language model.
    """
    if draws_dropout(model) or vars(model).get("_reads_whole_rows"):
        return False
    verdicts: dict[tuple[type, ...], bool] = vars(model).setdefault("_prefixes_are_shareable", {})
    classes = tuple(map(type, blocks_of(model)))
    if classes not in verdicts:
        verdicts[classes] = _verified(model)
    return verdicts[classes]


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Within the context every row of `model` is read whole, whatever others begin with."""
    outer = vars(model).get("_reads_whole_rows", False)
    vars(model)["_reads_whole_rows"] = True
    try:
        yield
    finally:
        vars(model)["_reads_whole_rows"] = outer


def _verified(model: nn.Module) -> bool:
    halves = split_head(model)
    if halves is None:
        return False
    rows = [np.array(row) for row in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 3], [1, 0, 2], [0, 1, 2, 3])]
    results = []
    try:
        if gradient_caches(model) is None:
            return False
        for share in (True, False):
            hidden_H_D, places_R_W = read(model, halves[0], rows, plan_reading(rows, share=share))
            places = [places_R_W[i, : len(row)] for i, row in enumerate(rows)]
            results.append(mx.stop_gradient(hidden_H_D)[mx.array(np.concatenate(places))])
        shared_N_D, whole_N_D = (values.astype(mx.float32) for values in results)
        errors_N = mx.linalg.norm(shared_N_D - whole_N_D, axis=-1) / mx.linalg.norm(whole_N_D, axis=-1)
        # the two passes round differently: by 1e-6 in float32, in 16 bits by a hundredth through many blocks
        return float(errors_N.mean()) < (1e-3 if results[1].dtype == mx.float32 else 5e-2)
    except Exception:  # each model's code fails in its own way where its caches are not what they seem
        return False


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many tokens two rows begin alike with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length
