"""Caches that a gradient flows through: what a text's later tokens read of its earlier ones, as plain arrays.

mlx-lm's caches write into buffers made for decoding. These keep what the model hands them as it is, so that one text
read in two parts has the gradient of the text read at once, and several texts can go on from one beginning.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)


class GradientCache:
    """What one block keeps of the tokens before."""

    def empty(self) -> bool:
        """Whether no token has been read."""
        raise NotImplementedError

    def arrays(self) -> list[Any]:
        """What is kept: arrays whose first axis is that of the rows, None where there is none yet, lists of those."""
        raise NotImplementedError

    def take(self, arrays: list[Any]) -> None:
        """Keep these from now on; the lists are those of `arrays()`."""
        raise NotImplementedError

    def holding(self, arrays: list[Any]) -> Any:
        """Another cache of this kind, which keeps these."""
        raise NotImplementedError


class KeysAndValues(ConcatenateKVCache, GradientCache):
    """All keys and values of a text. A sliding window acts through the mask, as in a run without a cache."""

    def arrays(self) -> list[Any]:
        return [self.keys, self.values]

    def holding(self, arrays: list[Any]) -> "KeysAndValues":
        cache = KeysAndValues()
        cache.take(arrays)
        return cache

    def take(self, arrays: list[Any]) -> None:
        self.keys, self.values = arrays
        self.offset = 0 if self.keys is None else self.keys.shape[-2]


class States(ArraysCache, GradientCache):
    """The states of a recurrent layer after a text."""

    def arrays(self) -> list[Any]:
        return list(self.cache)

    def holding(self, arrays: list[Any]) -> "States":
        cache = States(len(arrays))
        cache.take(arrays)
        return cache

    def take(self, arrays: list[Any]) -> None:
        self.cache = list(arrays)


class SeveralCaches(CacheList, GradientCache):
    """The caches of a block that keeps more than one."""

    caches: Any

    def arrays(self) -> list[Any]:
        return [cache.arrays() for cache in self.caches]

    def holding(self, arrays: list[Any]) -> "SeveralCaches":
        return SeveralCaches(*(cache.holding(part) for cache, part in zip(self.caches, arrays, strict=True)))

    def take(self, arrays: list[Any]) -> None:
        for cache, part in zip(self.caches, arrays, strict=True):
            cache.take(part)


def gradient_caches(model: nn.Module) -> list[Any] | None:
    """Empty caches for every block of `model`, or None where it asks for a kind that has none here."""
    made = [_of_kind(cache) for cache in make_prompt_cache(model)]
    return None if None in made else made


def spread(cache: Any, rows: list[int]) -> Any:
    """The cache of `sum(rows)` texts: row i of `cache` stands for `rows[i]` of them, one behind the other."""

    def each(array_N: mx.array) -> mx.array:
        # a broadcast's gradient is a sum; that of an index would be added up entry by entry
        parts = zip(mx.split(array_N, len(rows)), rows, strict=True)
        return mx.concatenate([mx.broadcast_to(part, (count, *part.shape[1:])) for part, count in parts if count])

    return cache.holding(map_arrays(each, cache.arrays()))


def map_arrays(function: Callable[[mx.array], mx.array], arrays: Any) -> Any:
    """`function` of every array of `cache.arrays()`, in the same lists."""
    if isinstance(arrays, list):
        return [map_arrays(function, array) for array in arrays]
    return None if arrays is None else function(arrays)


def _of_kind(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        inner: Any = cache.caches
        made = [_of_kind(part) for part in inner]
        return None if None in made else SeveralCaches(*made)
    if isinstance(cache, ArraysCache):
        return States(len(cache.cache))
    return KeysAndValues() if isinstance(cache, (KVCache, RotatingKVCache, ConcatenateKVCache)) else None
