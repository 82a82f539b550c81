"""The state that layers keep of what they have read, for several rows at once.

mlx-lm's own batch caches do the work, whatever a layer keeps. Added is what rollouts need of keys and values: no mask
where no row is padded, rows picked, repeated and put together without the host waiting for the device, positions that
are computed once for all layers, and a sliding window that stays in the order of time, so that sums over it do not
depend on the neighbours.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, make_prompt_cache

Cache = list[Any]
"""One entry a layer."""


def new_cache(model: nn.Module, num_rows: int) -> Cache:
    """An empty cache of `num_rows` rows.

    Raises:
        NotImplementedError: the model keeps a state that mlx-lm cannot batch.
    """
    layers = [make_prompt_cache(model) for _ in range(num_rows)]
    for layer in layers[0]:
        if not hasattr(layer, "merge"):
            raise NotImplementedError(f"it keeps its state in a {type(layer).__name__}, which mlx-lm cannot batch")
    no_padding = [0] * num_rows
    return [_of_rows(rows[0].merge(rows), no_padding) for rows in zip(*layers, strict=True)]


def select(cache: Cache, rows: Sequence[int], *, with_room: bool = False) -> Cache:
    """A new cache of the named rows, which may repeat; the old one stays as it is.

    Args:
        cache: of rows.
        rows: their places.
        with_room: keep the room that the buffers grow into, for rows that read on at once; else they are copied again
            then. Of a row that waits, or a beginning that many rows copy, only what is written is kept.
    """
    index = mx.array(list(rows), dtype=mx.int32)
    chosen = [_twin(layer) for layer in cache]
    for layer in chosen:
        _keep(layer, index, with_room=with_room)
    return chosen


def join(caches: Sequence[Cache]) -> Cache:
    """One cache of all rows, in their order. The first one is extended in place and returned."""
    first, *others = caches
    for other in others:
        for layer, more in zip(first, other, strict=True):
            layer.extend(more)
    return first


def loose_arrays(cache: Cache) -> list[mx.array]:
    """The arrays that a step's result may not depend on: left alone, their graphs would grow from step to step.

    Of keys and values it depends on all but the positions, which no layer of some models asks for.
    """
    positions = {id(layer.offset): layer.offset for layer in cache if isinstance(layer, RowsKVCache)}
    states = [*positions.values(), *(layer.state for layer in cache if not isinstance(layer, RowsKVCache))]
    return [value for _, value in tree_flatten(states) if isinstance(value, mx.array)]


def all_arrays(cache: Cache) -> list[mx.array]:
    """What the cache is made of: once evaluated, it holds nothing of the cache that it was selected from."""
    return [value for _, value in tree_flatten([layer.state for layer in cache]) if isinstance(value, mx.array)]


def num_bytes(cache: Cache) -> int:
    """Bytes that the cache holds, the room that it grows into included."""
    return sum(layer.nbytes for layer in cache)


@dataclass(frozen=True)
class RowBytes:
    """Bytes that one row keeps in caches of a model, measured in `cache`, which has read something and is not kept."""

    shares: tuple[tuple[int, float], ...]
    """Bytes a token and the most tokens kept, by part; what does not grow is one token's."""

    @classmethod
    def of(cls, cache: Cache) -> "RowBytes":
        return cls(tuple(share for layer in cache for share in _shares(layer)))

    def __call__(self, num_tokens: int) -> int:
        return sum(size * int(min(num_tokens, most)) for size, most in self.shares)


class OnceForAllLayers:
    """A change of the rows' positions that all layers make one after another, computed for the first of them.

    Layers whose positions are one array before the change have one array after it. Else a step would launch an addition
    for each layer, a twentieth of its launches. No array is kept for being known here.
    """

    def __init__(self, change: Callable[..., mx.array]):
        self._change = change
        self._last: tuple[list[Callable[[], Any]], Callable[[], Any]] = [], lambda: None  # threads replace it as one

    def __call__(self, *arguments: Any) -> mx.array:
        known, changed = self._last
        positions_B = changed()
        if positions_B is None or not all(map(_is_same, known, arguments)):
            positions_B = self._change(*arguments)
            self._last = list(map(_reference, arguments)), _reference(positions_B)
        return positions_B


def _reference(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, mx.array) else lambda: value


def _is_same(known: Callable[[], Any], value: Any) -> bool:
    return known() is value or (type(value) is int and known() == value)


_first_positions = OnceForAllLayers(lambda left_padding: -mx.array(left_padding))
_advanced = OnceForAllLayers(lambda positions_B, num_tokens: positions_B + num_tokens)
_without_padding = OnceForAllLayers(lambda positions_B, right_padding: positions_B - mx.array(right_padding))
_chosen = OnceForAllLayers(lambda positions_B, rows: positions_B[rows])
_joined = OnceForAllLayers(lambda positions_B, more_B: mx.concatenate([positions_B, more_B]))


class RowsKVCache(BatchKVCache):
    """Keys and values of left-padded rows, whose padding the host knows too.

    Rows of equal length need no mask: the fused attention kernels take none, or their own causal one.
    """

    def __init__(self, left_padding: list[int]):
        super().__init__(left_padding)
        self.offset = _first_positions(left_padding)
        self._pad(left_padding)
        self._host_right: list[int] | None = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **kwargs: Any) -> Any:
        if return_array or window_size or any(self.host_padding):
            return super().make_mask(N, return_array=return_array, window_size=window_size, **kwargs)
        return None if N == 1 else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        positions_B = self.offset
        seen = super().update_and_fetch(keys, values)  # its own sum is never computed
        self.offset = _advanced(positions_B, keys.shape[2])
        return seen

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        super().prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
        if self._right_padding is not None:
            self._host_right = right_padding

    def finalize(self) -> None:
        positions_B = self.offset
        super().finalize()
        if self._host_right is not None:
            self.offset = _without_padding(positions_B, self._host_right)
            self._pad([left + right for left, right in zip(self.host_padding, self._host_right, strict=True)])
            self._host_right = None

    def filter(self, batch_indices: mx.array, *, with_room: bool = False) -> None:
        rows: Any = batch_indices.tolist()
        padding = [self.host_padding[row] for row in rows]
        needless = min(padding, default=0)  # padding that all share
        if self.keys is not None:
            end = None if with_room else self._idx
            self.keys = self.keys[:, :, needless:end][batch_indices]
            self.values = self.values[:, :, needless:end][batch_indices]
            self._idx -= needless
        self.offset = _chosen(self.offset, batch_indices)
        self._pad([left - needless for left in padding])

    def extend(self, other: "RowsKVCache") -> None:
        longest = max(self._idx, other._idx)
        padding = [longest - cache._idx + left for cache in (self, other) for left in cache.host_padding]
        positions_B = self.offset
        super().extend(other)
        self.offset = _joined(positions_B, other.offset)
        self._pad(padding)

    def _pad(self, padding: list[int]) -> None:
        """Rows are padded so from now on; the device is given the numbers, not a sum that no mask may ever ask for."""
        self.host_padding, self.left_padding = padding, mx.array(padding, dtype=mx.int32)


class WindowRowsKVCache(RowsKVCache):
    """Keys and values of which a token sees the last `max_size`; what no token will see again is dropped now and then.

    Rows end together, so that the window is the end of the buffer for all of them.
    """

    def __init__(self, max_size: int, left_padding: list[int]):
        super().__init__(left_padding)
        self.max_size = max_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self._start
        super().update_and_fetch(keys, values)
        seen = self.keys[:, :, start : self._idx], self.values[:, :, start : self._idx]
        if start >= self.step:
            self.keys, self.values = self.keys[:, :, start:], self.values[:, :, start:]
            self._idx -= start
            self._pad([max(left - start, 0) for left in self.host_padding])
        return seen

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **kwargs: Any) -> Any:
        window, start = window_size or self.max_size, self._start
        is_padded = max(self.host_padding) > start
        if not (return_array or is_padded or (window < self.max_size and self._idx + N > window)):
            if N == 1:
                return None
            if self._idx + N <= window:
                return "causal"
        return create_causal_mask(N, self._idx - start, window, left_padding=self.left_padding - start)

    @property
    def _start(self) -> int:
        """Where the window of the next token to come begins."""
        return max(0, self._idx - self.max_size + 1)


def _of_rows(layer: Any, left_padding: list[int]) -> Any:
    if isinstance(layer, CacheList):
        layer.caches = tuple(_of_rows(inner, left_padding) for inner in layer.caches)
    elif isinstance(layer, BatchRotatingKVCache):
        return WindowRowsKVCache(layer.max_size, left_padding)
    elif isinstance(layer, BatchKVCache):
        return RowsKVCache(left_padding)
    elif isinstance(layer, ArraysCache):
        layer.left_padding = None
    return layer


def _twin(layer: Any) -> Any:
    twin = copy(layer)
    if isinstance(layer, CacheList):
        twin.caches = tuple(map(_twin, layer.caches))
    return twin


def _keep(layer: Any, rows: mx.array, *, with_room: bool) -> None:
    if isinstance(layer, CacheList):
        for inner in layer.caches:
            _keep(inner, rows, with_room=with_room)
    elif isinstance(layer, RowsKVCache):
        layer.filter(rows, with_room=with_room)
    else:
        layer.filter(rows)


def _shares(layer: Any) -> list[tuple[int, float]]:
    if isinstance(layer, CacheList):
        return [share for inner in layer.caches for share in _shares(inner)]
    if isinstance(layer, ArraysCache):
        return [(layer.nbytes // layer.batch_size, 1)]
    if layer.keys is None:
        return []  # of a layer without attention, which keeps nothing
    _, heads, _, key_width = layer.keys.shape
    size = heads * (key_width + layer.values.shape[3]) * layer.keys.dtype.size
    return [(size, getattr(layer, "max_size", math.inf))]  # a sliding window keeps no more
