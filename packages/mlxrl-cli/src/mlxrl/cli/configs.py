"""The configs that ship with the command line, and how options are put over a config."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlxrl.cli.embedded import embedded_config_path, embedded_model_path
from mlxrl.policy import register_model
from mlxrl.rollout.sampling import LEAST_TEMPERATURE
from mlxrl.train import ConfigError, TrainConfig, load_config, parse_override

register_model("embedded", embedded_model_path())


def read_config(path: Path | None, options: Mapping[str, Any], settings: Sequence[str]) -> TrainConfig:
    """The config of a command: a file or the embedded default, the command's options over it, then --set.

    Raises:
        ConfigError: see `mlxrl.train.load_config`.
    """
    overrides = {**options, **parse_settings(settings)}
    if path is None:
        return load_config(embedded_config_path(), overrides, source="the embedded default")
    return load_config(path, overrides)


def check_temperature(temperature: float) -> None:
    """Refuse an option --temperature that the sampler would.

    Raises:
        ConfigError: it is neither 0 nor at least the sampler's least.
    """
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(f"--temperature must be 0, or at least {LEAST_TEMPERATURE}, got {temperature}.")


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """The fields that --set names."""
    return dict(parse_override(setting) for setting in settings)


def example_names() -> list[str]:
    """Names of the shipped example configs."""
    folder = files("mlxrl.cli").joinpath("examples")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def example_text(name: str) -> str:
    """A shipped example config.

    Raises:
        ConfigError: there is no example of this name.
    """
    if name not in example_names():
        raise ConfigError(f"example {name!r} does not exist; there are {', '.join(example_names())}.")
    return files("mlxrl.cli").joinpath("examples", f"{name}.toml").read_text()
