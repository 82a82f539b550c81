"""A model in two halves: the trunk (token ids to hidden states) and the head (hidden states to logits).

The halves let a loss pay for the head only where a token is trained, and in chunks. Both are the model's own
`__call__`: the trunk is a run whose logits are dropped before anything computes them, the head a run over a trunk that
returns given hidden states. So masks, logit scales, soft caps, tied embeddings, quantized heads and adapters act as the
model defines them.
"""

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

TRUNK_NAMES = ("model", "transformer", "backbone")
BLOCKS_NAMES = ("layers", "h", "blocks")

Head = Callable[[mx.array], mx.array]


class Trunk(Protocol):
    """Token ids `[B, T]`, and perhaps a cache that is extended in place, to hidden states `[B, T, D]`."""

    def __call__(self, token_ids: mx.array, cache: Any = None) -> mx.array: ...


def split_head(model: nn.Module) -> tuple[Trunk, Head] | None:
    """The two halves of `model`, or None where they cannot be told apart.

    On the first call for a model the halves are run on three tokens and compared with the whole.

    Args:
        model: an mlx-lm causal language model.

    Returns:
        `trunk(token_ids [B, T], cache=None) -> hidden [B, T, D]` and `head(hidden [..., D]) -> logits [..., V]`, or
        None.
    """
    owner = _trunk_owner(model)
    if owner is None:
        return None
    trunk, head = _halves(owner)
    if not hasattr(model, "_head_is_separable"):
        tokens = mx.array([[0, 1, 2]])
        whole = model(tokens)
        try:
            halves = head(trunk(tokens))
            same = whole.shape == halves.shape and bool(mx.allclose(whole, halves, rtol=1e-3, atol=1e-3).item())
        except Exception:  # each model's code fails in its own way where its trunk is not what it seems
            same = False
        object.__setattr__(model, "_head_is_separable", same)
    return (trunk, head) if model._head_is_separable else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, which every mlx-lm model lists as `layers`."""
    blocks: Any = model.layers
    return list(blocks)


class _Tap:
    """Stands where the trunk stood: keeps what the trunk returns, or returns what it is given; lends all else."""

    def __init__(self, trunk: nn.Module, hidden: mx.array | None = None):
        self._trunk, self.hidden = trunk, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.hidden is None:
            self.hidden = self._trunk(*args, **kwargs)
        return self.hidden


def _halves(owner: nn.Module) -> tuple[Trunk, Head]:
    name = _trunk_name(owner)

    def tapped(tap: _Tap) -> Any:
        """The owner with the tap in place of its trunk; the owner itself stays as it is."""
        twin = owner.__class__.__new__(owner.__class__)
        twin.__dict__.update(owner.__dict__)
        dict.update(twin, owner)
        dict.__setitem__(twin, name, tap)
        return twin

    def trunk(token_ids: mx.array, cache: Any = None) -> Any:
        tap = _Tap(owner[name])
        tapped(tap)(token_ids, cache=cache)  # lazy: nothing reads the logits, so the head is not computed
        return tap.hidden

    def head(hidden: mx.array) -> mx.array:
        shape = hidden.shape
        rows_1_N_D = hidden.reshape(1, -1, shape[-1])
        unread_1_N = mx.zeros(rows_1_N_D.shape[:2], dtype=mx.int32)
        logits_1_N_V = tapped(_Tap(owner[name], rows_1_N_D))(unread_1_N)
        return logits_1_N_V.reshape(*shape[:-1], -1)

    return trunk, head


def _trunk_owner(model: nn.Module) -> nn.Module | None:
    """The outermost module with a trunk: the model itself, or the language model inside a multimodal wrapper."""
    queue = [model]
    while queue:
        module = queue.pop(0)
        if _trunk_name(module):
            return module
        queue += [child for child in module.children().values() if isinstance(child, nn.Module)]
    return None


def _trunk_name(module: nn.Module) -> str:
    for name in TRUNK_NAMES:
        child = module.get(name)
        if isinstance(child, nn.Module) and any(blocks in child for blocks in BLOCKS_NAMES):
            return name
    return ""
