"""`init`: a config to start from, commented from the fields' own documentation."""

from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mlxrl.cli.configs import example_names, example_text
from mlxrl.train import ConfigError, TrainConfig, config_schema

HEADER = "# A run of mlxrl. Every field is here with its default; what is commented out has none or is optional.\n"

# What stands beside a field without a default: values that one might set.
EXAMPLES = {
    "output": '"runs/mine"',
    "max_turns": "4",
    "max_observation_len": "256",
    "adapter": '"runs/first/adapters"',
    "last_layers": "8",
    "iogpu_wired_limit_mb": "24000",
    "micro_batch_size": "4",
    "echo_taper_steps": "100",
    "betas": "[0.9, 0.999]",
    "eps": "1e-8",
    "momentum": "0.95",
    "clip_low": "0.2",
    "clip_high": "0.28",
    "ddof": "1",
    "overlong_buffer": "64",
    "max_draws": "4",
    "max_skipped_steps": "5",
    "correction_cap": "2.0",
    "correction_band": "[0.5, 2.0]",
    "drgrpo_max_tokens": "256",
    "gigpo_omega": "1.0",
    "gigpo_gamma": "0.95",
    "max_context": "4096",
    "kv_budget_gb": "8.0",
    "timeout": "30.0",
}


def run_init(path: Path | None, *, example: str | None, list_examples: bool, schema: bool) -> None:
    """Print or write an example, the commented default, or the JSON schema."""
    if list_examples:
        typer.echo("\n".join(example_names()))
        return
    text = config_schema() + "\n" if schema else example_text(example) if example else commented_default()
    if path is None:
        typer.echo(text, nl=False)
        return
    try:
        if path.exists():
            raise ConfigError(f"{path} exists and is not overwritten; name another file or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); name another file.") from None
    typer.echo(f"wrote {path}; next: mlxrl-cli plan --config {path}")


def commented_default() -> str:
    """All fields of the config with their defaults and documentation, as TOML that loads as it is."""
    plain, tables = [], []
    for name, field in TrainConfig.model_fields.items():
        section = _section(field)
        if section is None:
            plain.append(_entry(name, field, required="embedded"))
        else:
            tables.append(_table(name, section, active=field.default is not None and name != "rewards"))
    return HEADER + "\n" + "\n".join(plain) + "\n" + "\n".join(tables)


def _table(name: str, section: type[BaseModel], *, active: bool) -> str:
    header = f"[[{name}]]" if name == "rewards" else f"[{name}]"
    entries = [_entry(key, field) for key, field in section.model_fields.items()]
    title = f"# {(section.__doc__ or '').strip().splitlines()[0]}\n"
    if not active:
        header = f"# {header}"
        entries = [entry if entry.lstrip().startswith("#") and "\n# " in entry else _off(entry) for entry in entries]
    return title + header + "\n" + "\n".join(entries)


def _entry(name: str, field: FieldInfo, required: str = "") -> str:
    comment = "".join(f"# {line}\n" for line in (field.description or "").splitlines())
    default = field.default
    if default is PydanticUndefined:
        return f'{comment}{name} = "{required}"\n' if required else f'{comment}# {name} = "..."\n'
    if default is None or default == {}:
        return f"{comment}# {name} = {_placeholder(name, field)}\n"
    return f"{comment}{name} = {_toml(default)}\n"


def _off(entry: str) -> str:
    return "".join(line if line.startswith("#") else f"# {line}" for line in entry.splitlines(keepends=True))


def _placeholder(name: str, field: FieldInfo) -> str:
    if name in EXAMPLES:
        return EXAMPLES[name]
    if field.default == {}:
        return "{}"
    kinds = [field.annotation, *get_args(field.annotation)]
    kinds += [inner for kind in kinds for inner in get_args(kind)]  # Literal values, and what Annotated wraps
    choices = [kind for kind in kinds if isinstance(kind, str | int) and not isinstance(kind, type)]
    return _toml(choices[0]) if choices else "true" if bool in kinds else '"..."'


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table or a list of tables."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
