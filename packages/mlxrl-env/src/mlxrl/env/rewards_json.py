"""A reward for answers in JSON of a given shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxrl.env.code_blocks import last_block
from mlxrl.env.json_schema import schema_check


def json_schema_reward(schema: Mapping[str, Any] | str) -> Callable[..., list[float | None]]:
    """Builds a reward that is 1 where the completion is JSON that fits a schema, and 0 elsewhere.

    The JSON is the last block between ``` fences, or else the whole completion; NaN and infinities are no JSON.

    Args:
        schema: a JSON schema, see `schema_check` for what it may say, or the path of a file that holds one.

    Raises:
        ValueError: the schema cannot be read or used.
    """
    fits = schema_check(_read(Path(schema)) if isinstance(schema, str) else schema)

    def json_schema(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """1 where the completion is JSON of the asked-for shape."""
        return [float(_fits(last_block(completion), fits)) for completion in completions]

    return json_schema


def _fits(text: str, fits: Callable[[Any], bool]) -> bool:
    try:
        return fits(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"schema {str(path)!r} cannot be read: {error}") from None
