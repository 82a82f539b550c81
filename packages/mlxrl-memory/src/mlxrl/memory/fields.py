"""Reading numbers and choices out of a config.json, with errors that name the field, the value and the remedy."""

from collections.abc import Mapping
from typing import Any, cast

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Fields:
    """The text part of a config: fields of `text_config` first, then those around it."""

    def __init__(self, config: Mapping[str, Any]):
        nested = config.get("text_config")
        self._values: dict[str, Any] = dict(config)
        if isinstance(nested, Mapping):
            self._values |= cast("Mapping[str, Any]", nested)
        self.model_type = str(self._values.get("model_type") or "unknown")

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        return next((self._values[n] for n in names if self._values.get(n) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The whole number under the first of `names` that is present, at least `least`; `default` if none is."""
        name = next((n for n in names if self._values.get(n) is not None), None)
        if name is None:
            if default is not None:
                return default
            raise ValueError(
                f"config.json of model_type {self.model_type!r} must hold {names[0]!r}, but the field is missing;"
                " take the config.json that came with the weights."
            )
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"config.json field {name!r} must be a whole number of at least {least}, got {value!r};"
                " take the config.json that came with the weights."
            )
        return value

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
