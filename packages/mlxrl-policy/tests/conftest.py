"""Tiny models on the CPU, written once a session; tests load their own copies and may change them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from mlxrl.policy import LoRAConfig, load_policy_with_lora
from mlxrl.policy.testing import ARCHITECTURES, make_tiny_model

Folders = Callable[..., Path]
Policy = Callable[..., Any]


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """folders("qwen3", bits=4) -> the folder of that tiny model, quantized or cast to a dtype on request."""
    mx.set_default_device(mx.cpu)
    made: dict[tuple[Any, ...], Path] = {}

    def folder(architecture: str, *, bits: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
        key = (architecture, bits, dtype)
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture)
            if bits or dtype != mx.float32:
                model, config = load_model(made[key])
                model.set_dtype(dtype)
                if bits:
                    model, config = quantize_model(model, config, group_size=32, bits=bits)
                save_model(made[key], model)
                save_config(config, made[key] / "config.json")
        return made[key]

    return folder


@pytest.fixture
def policy(folders: Folders) -> Policy:
    """policy("qwen3", rank=4) -> a policy of that model whose adapter is not zero, as if it had been trained."""

    def load(
        architecture: str, *, bits: int = 0, dtype: mx.Dtype = mx.float32, trained: bool = True, **config: Any
    ) -> nn.Module:
        config = {"rank": 4, "scale": 1.0} | config
        model, _, _ = load_policy_with_lora(folders(architecture, bits=bits, dtype=dtype), LoRAConfig(**config))
        if trained:
            train_by_chance(model)
        return model

    return load


@pytest.fixture
def base(folders: Folders) -> Policy:
    """base("qwen3") -> the model as mlx-lm loads it."""
    return lambda architecture, **options: mlx_lm.load(str(folders(architecture, **options)))[0]


@pytest.fixture
def trained() -> Callable[[nn.Module], nn.Module]:
    """trained(model) -> the model with every lora_b drawn at random."""
    return train_by_chance


@pytest.fixture
def put_on() -> Callable[..., None]:
    """put_on(model, adapter_class) -> None; see `put_adapters_on`."""
    return put_adapters_on


def put_adapters_on(model: Any, adapter_class: Any) -> None:
    """Gives every layer that the class can wrap an adapter of that class with non-zero factors."""
    wraps = {LoRALinear: nn.Linear, DoRALinear: nn.Linear, LoRASwitchLinear: SwitchLinear}
    for name, module in model.named_modules():
        if type(module) is wraps.get(adapter_class, nn.Embedding):
            adapter = adapter_class.from_base(module, r=2, scale=1.0)
            adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
            if "m" in adapter:
                adapter.m = 1.5 * adapter.m  # DoRA trains a magnitude too
            owner = model
            *path, leaf = name.split(".")
            for part in path:
                owner = owner[int(part)] if isinstance(owner, list) else owner[part]
            owner[leaf] = adapter


def train_by_chance(model: nn.Module) -> nn.Module:
    mx.random.seed(5)
    values: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    factors = [(name, 0.1 * mx.random.normal(v.shape)) for name, v in values.items() if name.endswith("lora_b")]
    model.update(tree_unflatten(factors))
    return model


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """Three rows of 12 token ids."""
    return np.random.default_rng(0).integers(5, 100, (3, 12))


@pytest.fixture(scope="session")
def mask() -> np.ndarray:
    """What is scored of them: the ends of rows of 12, 8 and 5 tokens, with a gap in the first."""
    mask = np.zeros((3, 12), dtype=bool)
    mask[0, 4:7] = mask[0, 9:12] = mask[1, 1:8] = mask[2, 4:5] = True
    return mask


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param
