"""Configs as TOML: read with clear errors, write resolved."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlxrl.train.config import TrainConfig
from mlxrl.train.errors import ConfigError


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, *, source: str | None = None
) -> TrainConfig:
    """Read a config, put overrides over it, and validate the result.

    Args:
        path: a TOML file; None starts from the defaults.
        overrides: dotted names and values, for example {"optimizer.learning_rate": 1e-4}; they win over the file.
        source: what messages call the config; by default the file's path.

    Raises:
        ConfigError: the file is missing or broken, or a field is unknown, of the wrong type, out of range or
            impossible together with another.
    """
    values = _read_toml(Path(path)) if path is not None else {}
    for name, value in (overrides or {}).items():
        _put(values, name, value)
    return make_config(values, source=source or (str(path) if path is not None else None))


def make_config(values: Mapping[str, Any], *, source: str | None = None) -> TrainConfig:
    """Validate a config given as nested dicts.

    Args:
        values: the fields, sections as dicts.
        source: where they came from, for the message.

    Raises:
        ConfigError: see `load_config`.
    """
    try:
        return TrainConfig.model_validate(_tuples_for_lists(values))
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors()]
        where = f" in {source}" if source else ""
        raise ConfigError(f"config error{where}: " + "\n".join(lines)) from None


def config_toml(config: TrainConfig) -> str:
    """The config as TOML, every field resolved; fields without a value are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def config_schema() -> str:
    """The JSON schema of the config, as text."""
    return json.dumps(TrainConfig.model_json_schema(), indent=2)


def parse_override(text: str) -> tuple[str, Any]:
    """Split key=value, the value read as TOML where it is TOML and as text otherwise.

    Raises:
        ConfigError: there is no "=".
    """
    name, found, value = text.partition("=")
    if not found or not name.strip():
        raise ConfigError(f"--set takes key=value, got {text!r}; for example --set optimizer.learning_rate=1e-4")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; `mlxrl-cli init` writes one to start from.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}.") from None


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, field = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {section} is not a section of the config.")
        values = inner
    values[field] = value


def _tuples_for_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has lists only; the fields that are tuples take them as such. Free-form tables stay as they are."""
    free_form = ("environment", "chat_template_kwargs", "options")
    return {name: value if name in free_form else _as_tuple(value) for name, value in values.items()}


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_as_tuple(item) for item in value)
    if isinstance(value, Mapping):
        return _tuples_for_lists(value)
    return value


def _explain(details: ErrorDetails) -> str:
    """One sentence for one error: the field's path, what must hold, the value, what to do."""
    path = [str(part) for part in details["loc"]]
    name = ".".join(part for part in path if not part.startswith("function-"))
    value = details.get("input")
    match details["type"]:
        case "extra_forbidden":
            known = _known_fields(path[:-1])
            close = difflib.get_close_matches(path[-1], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
            return f"{name}: unknown key; {hint}"
        case "missing":
            return f"{name}: needs a value; set it."
        case "value_error":
            message = str(details["ctx"]["error"]) if "ctx" in details else details["msg"]
            return f"{name}: {message}." if name else f"{message}."
        case _:
            message = details["msg"].removeprefix("Input ")
            return f"{name}: {message}, got {value!r} ({type(value).__name__})."


def _known_fields(path: list[str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if nested:
            model = nested[0]
    return sorted(model.model_fields)
