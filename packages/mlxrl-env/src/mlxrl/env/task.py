"""What a model is asked: chat messages and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

Message = dict[str, str]
"""One chat message: a dict with the keys "role" and "content"."""


@dataclass(frozen=True)
class Task:
    """One thing to ask: the prompt and what is known about it.

    Args:
        prompt: text, which becomes one user message, or a tuple of chat messages.
        columns: the row's data, for example {"answer": "23"}; reward functions get each column by its name.
        id: a name that tells the task from the others of its suite.
    """

    prompt: str | tuple[Message, ...]
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    id: str = ""


def as_messages(value: object) -> tuple[Message, ...]:
    """The chat messages of a prompt or an observation.

    Args:
        value: text, which becomes one user message, or a sequence of {"role": ..., "content": ...}.

    Returns:
        The messages, one or more.

    Raises:
        TypeError: value is neither text nor a sequence of messages.
        ValueError: value is an empty sequence.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": plain(value)},)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f"expected text or a list of chat messages, got {_shown(value)}; turn it into text first")
    items = cast(Sequence[object], value)
    if not items:
        raise ValueError("expected text or a list of chat messages, got an empty list; give at least one message")
    return tuple(_as_message(item) for item in items)


def plain(text: str) -> str:
    """The text without the methods of a subclass, which would be user code wherever the text is used."""
    return str.__str__(text)


def _as_message(item: object) -> Message:
    if isinstance(item, Mapping):
        fields = cast(Mapping[object, object], item)
        if isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str):
            return cast(Message, {name: plain(x) if isinstance(x, str) else x for name, x in fields.items()})
    raise TypeError(f'a chat message must be {{"role": text, "content": text}}, got {_shown(cast(object, item))}')


def _shown(value: object) -> str:
    """The value for an error message: its type and a short repr."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
