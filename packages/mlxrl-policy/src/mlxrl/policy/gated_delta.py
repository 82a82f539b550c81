"""Gated-delta layers under a gradient: MLX's own operation in place of mlx-lm's.

mlx-lm reads a text through a Metal kernel that has no gradient, or step by step in Python. `mx.fast.gated_delta_update`
is one operation with a gradient on every backend, and on Metal a kernel in both directions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx_lm.models.gated_delta as theirs

_in_steps: Any = theirs.gated_delta_ops


@contextmanager
def differentiable_gated_delta() -> Iterator[None]:
    """Within the context every gated-delta layer that is called can be differentiated; values stay as they are."""
    names = ("gated_delta_ops", "gated_delta_kernel")  # what mlx-lm chooses from
    kept = {name: getattr(theirs, name) for name in names}
    try:
        for name in names:
            setattr(theirs, name, _update)
        yield
    finally:
        for name, function in kept.items():
            setattr(theirs, name, function)


def _update(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> Any:
    if g.ndim == 4 or mask is not None:  # a gate per key channel, or rows that wait: step by step
        return _in_steps(q, k, v, g, beta, state, mask)
    # a checkpoint waits for the gradient of what it returns: else the states of all layers are computed anew at once
    return mx.checkpoint(mx.fast.gated_delta_update)(q, k, v, g, beta, state)
