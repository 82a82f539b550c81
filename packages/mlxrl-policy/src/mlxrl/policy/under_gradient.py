"""What layers become while a gradient is taken through them; their values stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn

from mlxrl.policy.adapter_gradients import lean_adapters
from mlxrl.policy.gated_delta import differentiable_gated_delta
from mlxrl.policy.swiglu_gradient import lean_swiglu


@contextmanager
def under_gradient(module: nn.Module) -> Iterator[None]:
    """Within the context the layers of `module` that are called have a gradient, and keep little for it."""
    with differentiable_gated_delta(), lean_adapters(module), lean_swiglu(module):
        yield
