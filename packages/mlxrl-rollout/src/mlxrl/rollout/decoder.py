"""The rows that decode together: their caches, next inputs and random keys on the device."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxrl.rollout.sampling import SamplingConfig, draw

# Tokens of a prompt that one forward pass reads: bounds the activations of a long prompt.
PREFILL_TOKENS = 2048

Cache = list[Any]


def prefill(model: nn.Module, token_ids: Sequence[int], cache: Cache | None = None) -> Cache:
    """Read all tokens but the last into the row's cache, a new one where none is given.

    The last token is left to the first decoding step, which needs its logits; no logits are computed here.

    Args:
        model: the policy.
        token_ids: at least one token.
        cache: the row's cache from an earlier turn; extended in place.

    Returns:
        The cache, one entry a layer, of batch size 1.
    """
    cache = make_prompt_cache(model) if cache is None else cache
    for start in range(0, len(token_ids) - 1, PREFILL_TOKENS):
        chunk = token_ids[start : min(start + PREFILL_TOKENS, len(token_ids) - 1)]
        model(mx.array([chunk]), cache=cache)
        mx.eval([layer.state for layer in cache])  # one chunk's activations at a time
    return cache


class DecodeBatch:
    """Rows of different lengths that sample one token each a step."""

    def __init__(self, model: nn.Module, sampling: SamplingConfig):
        self.model, self.sampling = model, sampling
        self.num_rows = 0
        self.num_forwards = 0
        self._cache: Cache = []
        self._inputs_B = mx.zeros(0, dtype=mx.int32)
        self._keys_B_2 = mx.zeros((0, 2), dtype=mx.uint32)
        self._positions_B = mx.zeros(0, dtype=mx.uint32)

    def join(
        self, caches: Sequence[Cache], inputs: Sequence[int], keys: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Add rows; a cache that several rows share is copied for each.

        Args:
            caches: per row, its cache; it holds every token but the row's next input.
            inputs: per row, the token to read next.
            keys: per row, its 64-bit random key.
            positions: per row, how many tokens it has drawn already.
        """
        joining = merge(caches)
        if self.num_rows == 0:
            self._cache = joining
        else:
            for layer, new in zip(self._cache, joining, strict=True):
                layer.extend(new)
        halves = [[key & 0xFFFFFFFF, key >> 32] for key in keys]
        self._inputs_B = mx.concatenate([self._inputs_B, mx.array(list(inputs), dtype=mx.int32)])
        self._keys_B_2 = mx.concatenate([self._keys_B_2, mx.array(halves, dtype=mx.uint32)])
        self._positions_B = mx.concatenate([self._positions_B, mx.array(list(positions), dtype=mx.uint32)])
        self.num_rows += len(caches)

    def step(self) -> tuple[list[int], list[float]]:
        """One forward pass: every row reads its input and draws the next token.

        Returns:
            Per row the token and its log-probability under the distribution it was drawn from.
        """
        logits_B_V = self.model(self._inputs_B[:, None], cache=self._cache)[:, -1]
        tokens_B, logprobs_B = draw(logits_B_V, self._keys_B_2, self._positions_B, self.sampling)
        self._inputs_B, self._positions_B = tokens_B, self._positions_B + 1
        self.num_forwards += 1
        mx.eval(tokens_B, logprobs_B, [layer.state for layer in self._cache])  # the host decides who goes on
        tokens: Any = tokens_B.tolist()
        logprobs: Any = logprobs_B.tolist()
        return tokens, logprobs

    def extract(self, row: int) -> Cache:
        """A copy of one row's cache, to go on with later."""
        return [layer.extract(row) for layer in self._cache]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row that is not named; the rest keep their order."""
        if len(rows) == self.num_rows:
            return
        self.num_rows = len(rows)
        if not rows:
            self._cache = []
        index = mx.array(list(rows), dtype=mx.int32)
        for layer in self._cache:
            layer.filter(index)
        self._inputs_B, self._positions_B = self._inputs_B[index], self._positions_B[index]
        self._keys_B_2 = self._keys_B_2[index]


def merge(caches: Sequence[Cache]) -> Cache:
    """One cache of several rows out of caches of one row each, which stay as they are."""
    for layer in caches[0]:
        if not hasattr(layer, "merge"):
            raise NotImplementedError(
                f"this model keeps its state in a {type(layer).__name__}, which mlx-lm cannot batch; use another model."
            )
    return [layers[0].merge(layers) for layers in zip(*caches, strict=True)]
