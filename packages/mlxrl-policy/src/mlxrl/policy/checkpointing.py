"""Gradient checkpointing, one transformer block at a time.

A block that is checkpointed keeps only its input during the forward pass and runs again during the backward pass. The
block's *instance* is moved to a subclass of its class, so another model of the same class is not touched, and a call
with a cache of decoding goes straight through. What a cache that gradients flow through keeps goes in and comes out as
arrays of the recomputed function, for a gradient passes those alone.
"""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.gradient_caches import GradientCache, map_arrays
from mlxrl.policy.head import blocks_of
from mlxrl.policy.under_gradient import under_gradient


def checkpoint_blocks(model: nn.Module, *, enabled: bool = True) -> None:
    """Make every block of `model.layers` recompute its activations in the backward pass, or keep them again.

    Args:
        model: an mlx-lm model; changed in place.
        enabled: recompute (True) or keep (False); asking twice is asking once.
    """
    for block in blocks_of(model):
        kind = type(block)
        if enabled and kind not in _plain_classes:
            block.__class__ = _recomputing(kind)
        elif not enabled and kind in _plain_classes:
            block.__class__ = _plain_classes[kind]


_subclasses: dict[type, type] = {}
_plain_classes: dict[type, type] = {}


def _recomputing(block_class: type) -> type:
    if block_class not in _subclasses:

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            cache = next((value for value in values if isinstance(value, GradientCache)), None)
            if not all(value is cache or _is_plain(value) for value in values):  # decoding, with a cache of its own
                return block_class.__call__(self, *args, **kwargs)

            kept = [] if cache is None else cache.arrays()
            fills = cache is not None and cache.empty()  # what the tokens after a beginning leave is never read
            replay = _Replay() if draws_dropout(self) else nullcontext()

            def run(parameters: dict, kept: list[Any], *args: Any, **kwargs: Any) -> Any:
                self.update(parameters)
                twin: Any = None if cache is None else cache.holding(kept)
                args = tuple(twin if value is cache else value for value in args)
                kwargs = {name: twin if value is cache else value for name, value in kwargs.items()}
                with replay, under_gradient(self):
                    output = block_class.__call__(self, *args, **kwargs)
                # copies: of an array that is returned twice, MLX takes one gradient alone
                return output, map_arrays(mx.contiguous, twin.arrays()) if fills else []

            output, written = mx.checkpoint(run)(self.trainable_parameters(), kept, *args, **kwargs)
            if cache is not None and fills:
                cache.take(written)
            return output

        subclass = type(f"Recomputing{block_class.__name__}", (block_class,), {"__call__": call})
        _subclasses[block_class], _plain_classes[subclass] = subclass, block_class
    return _subclasses[block_class]


def draws_dropout(model: nn.Module) -> bool:
    """Whether a dropout layer of `model` acts: two calls then differ."""
    # every dropout layer of mlx.nn keeps the part that it lets through as `_p_1`
    return any(module.training and getattr(module, "_p_1", 1) < 1 for module in model.modules())


class _Replay:
    """Entered again, it draws the random numbers of the first time again, and leaves the outer state as it was."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.outer: int | None = None

    def __enter__(self) -> None:
        if self.start is None:
            self.start = _random_state()
        else:
            self.outer = _random_state()
            mx.random.seed(self.start)

    def __exit__(self, *_: object) -> None:
        if self.outer is not None:
            mx.random.seed(self.outer)


def _random_state() -> int:
    """MLX's global random state as the seed that brings it back."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return high << 32 | low


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (mx.array, str, bool, int, float))
