"""A model in two halves: the trunk (token ids to hidden states) and the head (hidden states to logits).

The halves let a loss pay for the head only where a token is trained, and in chunks. The head is the model's own
`__call__` run over a trunk that returns given hidden states, so logit scales, soft caps, tied embeddings, quantized
heads and adapters act as the model defines them.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

TRUNK_NAMES = ("model", "transformer", "backbone")

Trunk = Callable[[mx.array], mx.array]
Head = Callable[[mx.array], mx.array]


def split_head(model: nn.Module) -> tuple[Trunk, Head] | None:
    """The two halves of `model`, or None where they cannot be told apart.

    On the first call for a model the halves are run on three tokens and compared with the whole.

    Args:
        model: an mlx-lm causal language model.

    Returns:
        `trunk(token_ids [B, T]) -> hidden [B, T, D]` and `head(hidden [..., D]) -> logits [..., V]`, or None.
    """
    owner = _trunk_owner(model)
    if owner is None:
        return None
    trunk, head = owner[_trunk_name(owner)], _head_of(owner)
    if not hasattr(model, "_head_is_separable"):
        tokens = mx.array([[0, 1, 2]])
        whole, halves = model(tokens), head(trunk(tokens))
        same = whole.shape == halves.shape and mx.allclose(whole, halves, rtol=1e-3, atol=1e-3).item()
        object.__setattr__(model, "_head_is_separable", bool(same))
    return (trunk, head) if model._head_is_separable else None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, which every mlx-lm model lists as `layers`."""
    blocks: Any = model.layers
    return list(blocks)


class _GivenHidden(nn.Module):
    """Stands where the trunk stood: returns what it is given, and lends the trunk's embedding to a tied head."""

    def __init__(self, trunk: nn.Module):
        super().__init__()
        object.__setattr__(self, "_trunk", trunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_trunk"), name)

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden


def _head_of(owner: nn.Module) -> Head:
    name = _trunk_name(owner)
    twin = owner.__class__.__new__(owner.__class__)
    twin.__dict__.update(owner.__dict__)
    dict.update(twin, owner)
    dict.__setitem__(twin, name, _GivenHidden(owner[name]))

    def head(hidden: mx.array) -> mx.array:
        shape = hidden.shape
        logits = twin(hidden.reshape(1, -1, shape[-1]))
        return logits.reshape(*shape[:-1], -1)

    return head


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
        if isinstance(child, nn.Module) and ("layers" in child or "h" in child):
            return name
    return ""
