"""Tests run on the CPU, the one device where MLX has float64."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=25, deadline=None)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)
