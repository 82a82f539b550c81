"""How a row of data becomes the prompt of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, cast

from mlxrl.env.options import check_text
from mlxrl.env.tables import shown
from mlxrl.env.task import Message, as_messages


class PromptTemplate:
    """A text with columns of the row in braces: "Solve {question}", where {{ and }} stand for braces themselves.

    Raises:
        ValueError: the text has no column in braces, or braces that are no column.
    """

    def __init__(self, text: str) -> None:
        check_text("prompt_template", text)
        try:
            pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"prompt_template: {error}, in {shown(text)}; {_BRACES}") from None
        for _, column, spec, conversion in pieces:
            if column is not None and (not column or spec or conversion):
                raise ValueError(f"prompt_template has braces that are no column, in {shown(text)}; {_BRACES}")
        self._pieces = [(literal, column) for literal, column, _, _ in pieces]
        self.columns = tuple(dict.fromkeys(column for _, column in self._pieces if column is not None))
        if not self.columns:
            raise ValueError(f"prompt_template = {shown(text)} asks the same of every row; {_BRACES}")

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises:
            ValueError: a column in braces is neither text nor a number.
        """
        return "".join(literal + ("" if column is None else _word(row, column)) for literal, column in self._pieces)


def as_prompt(value: object) -> str | tuple[Message, ...]:
    """A cell as a prompt.

    Raises:
        ValueError: it is neither text nor a list of chat messages, or it is empty.
    """
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        try:
            return as_messages(cast(object, value))
        except TypeError as error:
            raise ValueError(str(error)) from None
    raise ValueError(
        f"a prompt must be text or a list of chat messages, and not empty, got {shown(cast(object, value))}"
    )


def with_system(prompt: str | Sequence[Message], system: str) -> tuple[Message, ...]:
    """The prompt's messages behind a system message.

    Raises:
        ValueError: it begins with one of its own.
    """
    messages = as_messages(prompt)
    if messages[0]["role"] == "system":
        own = shown(messages[0]["content"])
        raise ValueError(f"the prompt begins with a system message of its own, {own}; leave system_prompt out")
    return ({"role": "system", "content": system}, *messages)


_BRACES = "write a column as {column}, and braces themselves as {{ and }}"


def _word(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"prompt_template asks for {{{column}}}, which must be text or a number, got {shown(value)}")
