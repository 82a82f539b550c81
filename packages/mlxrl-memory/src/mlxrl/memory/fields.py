"""Reading numbers and choices out of a config.json, with errors that name the field, the value and the remedy."""

from collections.abc import Mapping
from typing import Any, cast

MOST = 2**40  # above what any model has, and far below what a float holds
NESTED = ("gemma3", "qwen3_5", "qwen3_5_moe")  # mlx-lm puts their text model into one of several parts
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Fields:
    """The text part of a config: fields of `text_config` first, then those around it."""

    def __init__(self, config: Mapping[str, Any]):
        text: Any = config.get("text_config")
        text = {} if text is None else text
        if not isinstance(text, Mapping):
            raise ValueError(
                f"config.json field 'text_config' must be an object, got {text!r};"
                " take the config.json that came with the weights."
            )
        self._around: dict[str, Any] = dict(config)
        self._values: dict[str, Any] = self._around | dict(cast("Mapping[str, Any]", text))
        model_type = self.get("model_type")
        if model_type is not None and not isinstance(model_type, str):
            raise ValueError(f"config.json field 'model_type' must be a name, got {model_type!r}; correct the file.")
        self.model_type = model_type or "unknown"
        self.nested = text != {} or config.get("model_type") in NESTED

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        return next((self._values[n] for n in names if self._values.get(n) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """The whole number under the first of `names` that is present, `least` to `most`; `default` if none is."""
        name = next((n for n in names if self._values.get(n) is not None), None)
        if name is None:
            if default is not None:
                return default
            raise ValueError(
                f"config.json of model_type {self.model_type!r} must hold {names[0]!r}, but the field is missing;"
                " take the config.json that came with the weights."
            )
        return _whole(name, self._values[name], least, most)

    def listed(self, name: str, kind: type, words: str) -> list[Any] | None:
        """The list under `name`, of values of `kind`, in `words` such as "names"; None where there is none."""
        value = self.get(name)
        if value is None:
            return None
        values = cast("list[Any]", value) if isinstance(value, list | tuple) else [None]
        if any(isinstance(x, bool) or not isinstance(x, kind) for x in values):
            raise ValueError(
                f"config.json field {name!r} must be a list of {words}, got {value!r};"
                " take the config.json that came with the weights."
            )
        return list(values)

    def context_length(self) -> int | None:
        """`max_position_embeddings`, that around the text part first, as `mlxrl.policy.context_length` has it."""
        for values in (self._around, self._values):
            if values.get("max_position_embeddings") is not None:
                return _whole("max_position_embeddings", values["max_position_embeddings"], 1, MOST)
        return None

    def flag(self, name: str, default: bool) -> bool:
        """The boolean under `name`, or `default`."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config.json field {name!r} must be true or false, got {value!r}; correct the file.")
        return value

    def dtype(self) -> str:
        """`dtype` or `torch_dtype`; bfloat16 where neither is given."""
        name = str(self.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise ValueError(f"config.json field 'dtype' must be one of {sorted(DTYPE_BYTES)}, got {name!r}; set one.")
        return name


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """The value, which must be a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = f"at most {most}" if isinstance(value, int) and value > most else f"at least {least}"
        raise ValueError(
            f"config.json field {name!r} must be a whole number of {bound}, got {value!r};"
            " take the config.json that came with the weights."
        )
    return value
