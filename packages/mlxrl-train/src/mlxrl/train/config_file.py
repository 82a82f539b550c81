"""Configs as TOML: read with clear errors, write resolved."""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlxrl.train.config import RewardConfig, TrainConfig
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
    source = source or (str(path) if path is not None else None)
    return make_config(values, source=source, given_over=tuple(overrides or ()))


def make_config(values: Mapping[str, Any], *, source: str | None = None, given_over: Sequence[str] = ()) -> TrainConfig:
    """Validate a config given as nested dicts.

    Args:
        values: the fields, sections as dicts.
        source: where they came from, for the message.
        given_over: dotted names of those that came from elsewhere, such as the command line.

    Raises:
        ConfigError: see `load_config`.
    """
    try:
        return TrainConfig.model_validate(_tuples_for_lists(values))
    except ValidationError as error:
        lines: dict[str, list[str]] = {}
        for details in error.errors():
            lines.setdefault(_place(_name(details), source, given_over), []).append(_explain(details))
        parts = [f"config error{place}: " + "\n".join(told) for place, told in lines.items()]
        raise ConfigError("\n".join(parts)) from None


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
            raise ConfigError(f"{name}: {section} is not a section of the config; set {section} as a whole.")
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


def _name(details: ErrorDetails) -> str:
    """The dotted name of the field; of a list of fixed length, which its elements belong to, that of the list."""
    path = [str(part) for part in details["loc"] if not str(part).startswith("function-")]
    return ".".join(path[:-1] if details["type"] == "missing" and path[-1].isdecimal() else path)


def _place(name: str, source: str | None, given_over: Sequence[str]) -> str:
    """Where a faulty field, or a faulty combination of fields, was set."""
    if source is None:
        return ""
    if any(f"{name}.".startswith(f"{given}.") for given in given_over):
        return f" in an option given over {source}"
    if any(not name or given.startswith(f"{name}.") for given in given_over):
        return f" in {source} with the options given over it"
    return f" in {source}"


def _explain(details: ErrorDetails) -> str:
    """One sentence for one error: the field's path, what must hold, the value, what to do."""
    name, value = _name(details), details.get("input")
    section, _, field = name.rpartition(".")
    match details["type"]:
        case "extra_forbidden":
            known = sorted(_model(section).model_fields)
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
            return f"{name}: unknown key; {hint}"
        case "missing" if not isinstance(value, tuple):
            what = " ".join((_model(section).model_fields[field].description or "").split())
            return f"{name}: needs a value; set it. What it is: {what}"
        case "value_error":
            message = str(details["ctx"]["error"]) if "ctx" in details else details["msg"]
            return f"{name}: {message}." if name else f"{message}."
        case "model_type":
            must = "should be a table of fields"
        case "dict_type":
            must = "should be a table, such as {key = 1}"
        case "missing" | "tuple_type" | "too_long":
            must = f"should be {_described(_model(section).model_fields[field].annotation)}"
        case _:
            must = details["msg"].removeprefix("Input ").removeprefix("String ")
    shown = list(value) if isinstance(value, tuple) else value
    return f"{name}: {must}, got {shown!r} ({type(shown).__name__})."


def _described(annotation: Any) -> str:
    """A field that is a list, by its type: tuple[str, ...], tuple[float, float], or one of them or None."""
    kind = next(kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is tuple)
    item, *others = get_args(kind)
    if item is RewardConfig:
        return "a list of tables, each written as [[rewards]]"
    what = "number" if float in (item, *get_args(item)) else "string"
    return f"a list of {what}s" if others == [...] else f"a list of {len(others) + 1} {what}{'s' if others else ''}"


def _model(section: str) -> type[BaseModel]:
    """The fields of a section, "" for those of the config itself."""
    model: type[BaseModel] = TrainConfig
    for part in section.split("."):
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = [annotation, *get_args(annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return model
