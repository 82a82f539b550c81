"""Rows that share forward passes: read what is pending, then draw a token a row and step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy import split_head
from mlxrl.rollout.caches import Cache, join, loose_arrays, select
from mlxrl.rollout.episode import Episode
from mlxrl.rollout.sampling import Drawing, drawing

# Tokens that one forward pass reads: bounds the activations of long prompts and of many.
PREFILL_TOKENS = 2048


@dataclass(eq=False)
class Row:
    """An episode's turn in the making.

    Args:
        episode: whose turn it is.
        num_read: tokens of the episode's segment that the row's cache holds, the launched steps included.
        num_drawn: tokens of this turn whose draw is launched; the host has seen all of them but the newest.
        ended: the action is over, and what is drawn from now on is nobody's.
    """

    episode: Episode
    num_read: int = 0
    num_drawn: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self._drawn_before = self.episode.num_drawn

    @property
    def position(self) -> int:
        """Tokens drawn in the whole episode, those under way included: where the row is in its random stream."""
        return self._drawn_before + self.num_drawn

    @property
    def goes_on(self) -> bool:
        """Whether the row may still need another token, as far as the host knows."""
        return not self.ended and self.num_drawn < self.episode.max_draws


class Draws(NamedTuple):
    """Tokens int32 `[B]` and log-probabilities float32 `[B]` that the device is computing for these rows."""

    rows: Sequence[Row]
    tokens: mx.array
    logprobs: mx.array


class Prefilled(NamedTuple):
    """A cache, and the logits `[B, V]` after the last token of each of its rows."""

    cache: Cache
    logits: mx.array

    def select(self, rows: Sequence[int]) -> "Prefilled":
        """The named rows, which may repeat."""
        return Prefilled(select(self.cache, rows), self.logits[mx.array(list(rows))])


@dataclass
class DeviceClock:
    """Hands arrays to the device and waits for them, and sums up how long the host takes for the one and the other."""

    launch_seconds: float = 0.0
    wait_seconds: float = 0.0

    def launch(self, *arrays: Any) -> None:
        """Have arrays, or lists of them, computed; the host does not wait."""
        begin = time.perf_counter()
        mx.async_eval(*arrays)
        self.launch_seconds += time.perf_counter() - begin

    def wait(self, *arrays: Any) -> None:
        """Wait for arrays that were launched."""
        begin = time.perf_counter()
        mx.eval(*arrays)
        self.wait_seconds += time.perf_counter() - begin


class Reader:
    """Reads tokens into caches; the head runs on the last token of each row alone.

    Attributes:
        num_forwards: forward passes so far; a text that is read in pieces takes one a piece.
    """

    def __init__(self, model: nn.Module, clock: DeviceClock | None = None):
        halves = split_head(model)
        self._trunk, self._head = halves if halves is not None else (model, None)
        self._clock = clock or DeviceClock()
        self.num_forwards = 0

    def __call__(self, cache: Cache, token_ids: Sequence[Sequence[int]]) -> Prefilled:
        """Read on in every row.

        Args:
            cache: of as many rows; extended in place.
            token_ids: per row at least one token; rows of different length are padded on the right.

        Returns:
            The cache and the logits `[B, V]` after the last token of each row.
        """
        lengths = [len(row) for row in token_ids]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for layer in cache:
                layer.prepare(lengths=lengths, right_padding=padding)
        padded: Any = [[*row, *[0] * pad] for row, pad in zip(token_ids, padding, strict=True)]
        tokens_B_T, start = mx.array(padded, dtype=mx.int32), 0
        while longest - start > PREFILL_TOKENS:  # one long row: `reading_plan` never puts several together
            piece = self._read(tokens_B_T[:, start : start + PREFILL_TOKENS], cache), loose_arrays(cache)
            self._clock.launch(*piece)
            self._clock.wait(*piece)  # one piece's activations at a time
            start += PREFILL_TOKENS
        hidden_B_T_D = self._read(tokens_B_T[:, start:], cache)
        if any(padding):
            for layer in cache:
                layer.finalize()
        ends_B = mx.array(lengths) - start - 1
        last_B_D = hidden_B_T_D[mx.arange(len(lengths)), ends_B]
        logits_B_V = last_B_D if self._head is None else self._head(last_B_D)
        self._clock.launch(logits_B_V, loose_arrays(cache))
        return Prefilled(cache, logits_B_V)

    def _read(self, tokens_B_T: mx.array, cache: Cache) -> mx.array:
        self.num_forwards += 1
        return self._trunk(tokens_B_T, cache=cache)


def reading_plan(lengths: Sequence[int], *, ragged: bool) -> list[list[int]]:
    """Which texts to read together: of like length, so that there is never more padding than text.

    Args:
        lengths: tokens of each text.
        ragged: whether the model can read texts of different length together; if not, only equal ones share a pass.

    Returns:
        Indices of texts, a list a forward pass.
    """
    plan: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        together = [*plan[-1], i] if plan else [i]
        padded = len(together) * lengths[i]
        fits = padded <= min(PREFILL_TOKENS, 2 * sum(lengths[j] for j in together))
        if plan and fits and (ragged or lengths[plan[-1][0]] == lengths[i]):
            plan[-1] = together
        else:
            plan.append([i])
    return plan


@dataclass
class DecodeBatch:
    """The rows that decode: each step reads the token that every row drew last, and draws the next."""

    model: nn.Module
    rows: list[Row] = field(default_factory=list)
    clock: DeviceClock = field(default_factory=DeviceClock)
    num_steps: int = 0
    cache: Cache = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inputs_B = mx.zeros(0, dtype=mx.int32)
        self._keys_B_2, self._positions_B = _keys_and_positions(self.rows)
        self._drawing: Drawing | None = None

    def step(self) -> Draws:
        """Launch a forward pass and its draws; the host does not wait."""
        self._drawing = self._drawing or drawing([row.episode.sampling for row in self.rows])
        logits_B_V = self.model(self._inputs_B[:, None], cache=self.cache)[:, -1]
        tokens_B, logprobs_B = self._drawing(logits_B_V, self._keys_B_2, self._positions_B)
        self.clock.launch(tokens_B, logprobs_B, loose_arrays(self.cache))
        self._inputs_B, self._positions_B = tokens_B, self._positions_B + 1
        for row in self.rows:
            if not row.ended:  # what an ended row reads and draws from now on is nobody's
                row.num_read += 1
                row.num_drawn += 1
        self.num_steps += 1
        return Draws(self.rows, tokens_B, logprobs_B)

    def regroup(self, keep: Sequence[int], joining: Sequence[tuple[list[Row], Prefilled]]) -> Draws | None:
        """Drop all rows but those to keep, add those that have been read, and launch the first draw of these.

        Args:
            keep: places of the rows that stay, in their order.
            joining: groups of new rows, each with its cache and its logits.
        """
        if len(keep) < len(self.rows):
            # rows that join would have all buffers copied once more
            self.cache = select(self.cache, keep, with_room=not joining) if keep else []
            self.rows = [self.rows[i] for i in keep]
            self._inputs_B = self._inputs_B[mx.array(list(keep), dtype=mx.int32)]
        draws = None
        if joining:
            new = [row for rows, _ in joining for row in rows]
            logits_B_V = mx.concatenate([prefilled.logits for _, prefilled in joining])
            draw = drawing([row.episode.sampling for row in new])
            draws = Draws(new, *draw(logits_B_V, *_keys_and_positions(new)))
            for row in new:
                row.num_drawn += 1
            self.cache = join([*([self.cache] if self.rows else []), *(prefilled.cache for _, prefilled in joining)])
            self.rows = [*self.rows, *new]
            self._inputs_B = mx.concatenate([self._inputs_B, draws.tokens])
            self.clock.launch(draws.tokens, draws.logprobs, loose_arrays(self.cache))
        self._keys_B_2, self._positions_B = _keys_and_positions(self.rows)
        self._drawing = None
        return draws


def _keys_and_positions(rows: Sequence[Row]) -> tuple[mx.array, mx.array]:
    """The rows' keys uint32 `[B, 2]`, and uint32 `[B]` how many tokens each has drawn in its episode."""
    if not rows:
        return mx.zeros((0, 2), dtype=mx.uint32), mx.zeros(0, dtype=mx.uint32)
    keys = [row.episode.request.key for row in rows]
    halves: Any = [[key & 0xFFFFFFFF, key >> 32] for key in keys]
    positions = [row.position for row in rows]
    return mx.array(halves, dtype=mx.uint32), mx.array(positions, dtype=mx.uint32)
