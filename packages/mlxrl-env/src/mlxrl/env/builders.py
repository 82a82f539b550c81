"""Options of what is built by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mlxrl.env.names import unknown


def checked_options(
    what: str,
    builder: Callable[..., Any],
    options: dict[str, Any],
    *,
    where: str,
    given: Sequence[str] = (),
    hint: str = "",
) -> dict[str, Any]:
    """The options, if a builder takes each of them and needs no other.

    Args:
        what: what is built, for messages: "environment 'jsonl'".
        builder: takes the options by keyword.
        options: the options.
        where: where options are set, for messages: "[environment]".
        given: parameters of the builder that are no options.
        hint: what else to say where an option is missing.

    Raises:
        ValueError: an option is unknown, or one is missing.
    """
    parameters = {key: p for key, p in inspect.signature(builder).parameters.items() if key not in given}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in named and not takes_any:
            raise unknown(f"option of {what}:", option, named)
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            raise ValueError(f"{what} needs the option {key!r}; set it under {where}{hint}")
    return options
