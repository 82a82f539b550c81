"""Gradient checkpointing, one transformer block at a time.

A block that is checkpointed keeps only its input during the forward pass and runs again during the backward pass. The
block's *instance* is moved to a subclass of its class, so another model of the same class is not touched, and a call
with a cache (decoding) goes straight through.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def checkpoint_blocks(model: nn.Module, *, enabled: bool = True) -> None:
    """Make every block of `model.layers` recompute its activations in the backward pass, or keep them again.

    Args:
        model: an mlx-lm model; changed in place.
        enabled: recompute (True) or keep (False); asking twice is asking once.
    """
    for block in model.layers:
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
            if not all(_is_plain(value) for value in (*args, *kwargs.values())):  # a cache: this is decoding
                return block_class.__call__(self, *args, **kwargs)

            def run(parameters: dict, key: mx.array, *args: Any, **kwargs: Any) -> Any:
                self.update(parameters)
                outer_key = mx.random.state[0]
                mx.random.state[0] = key  # so that the recomputation draws the same dropout masks
                try:
                    return block_class.__call__(self, *args, **kwargs)
                finally:
                    mx.random.state[0] = outer_key

            mx.random.state[0], key = mx.random.split(mx.random.state[0])
            return mx.checkpoint(run)(self.trainable_parameters(), key, *args, **kwargs)

        subclass = type(f"Recomputing{block_class.__name__}", (block_class,), {"__call__": call})
        _subclasses[block_class], _plain_classes[subclass] = subclass, block_class
    return _subclasses[block_class]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (mx.array, str, bool, int, float))
