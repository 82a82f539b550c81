"""Tiny policies on the CPU, made once a session; no test here changes a weight of one that it was lent."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxrl.policy import LoRAConfig, load_policy_with_lora
from mlxrl.policy.testing import ARCHITECTURES, make_scripted_model, make_tiny_model

from .comparing import draw_adapter

Lend = Callable[..., tuple[Any, Any]]


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Lend:
    """make("qwen3", tokenizer=...) -> a new policy whose adapter is not zero, and its tokenizer."""

    def policy(architecture: str, **options: Any) -> tuple[Any, Any]:
        mx.set_default_device(mx.cpu)
        folder = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture, **options)
        model, tokenizer, _ = load_policy_with_lora(
            folder, LoRAConfig(rank=2, scale=1.1)
        )  # no power of two: products round
        draw_adapter(model, 5)
        return model, tokenizer

    return policy


@pytest.fixture(scope="session")
def lend(make: Lend) -> Lend:
    """lend("qwen3") -> that policy and its tokenizer, the same each time."""
    made: dict[str, tuple[Any, Any]] = {}

    def policy(architecture: str) -> tuple[Any, Any]:
        if architecture not in made:
            made[architecture] = make(architecture)
        return made[architecture]

    return policy


@pytest.fixture
def scripted(tmp_path) -> Lend:
    """scripted({"<|assistant|>": "g", "g": "o"}) -> a policy that says "go", and its tokenizer."""

    def policy(follows: dict[str, str], **options: Any) -> tuple[Any, Any]:
        model, tokenizer, _ = load_policy_with_lora(make_scripted_model(tmp_path, follows, **options))
        return model, tokenizer

    return policy


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param
