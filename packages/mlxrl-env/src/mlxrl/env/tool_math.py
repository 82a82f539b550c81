"""Tool math: sums too large to do in the head, and a calculator to call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from mlxrl.env.calculator import calculate, shown
from mlxrl.env.game import GameSuite
from mlxrl.env.levels import LevelGame, level_suite
from mlxrl.env.numbers import whole_number
from mlxrl.env.task import Message

FORMS = ("{} * {} + {}", "({} + {}) * {}", "{} * ({} - {})", "{} * {} - {} * {}")

MOST_CALLS = 8  # of a text's JSON objects that are looked at, from the end: reading a nested one takes its time

_HELP = "Use <tool>12 * 3</tool> to calculate, <answer>36</answer> to answer."
_TAGS = re.compile(
    r"<(tool|tool_call|answer)>([^<>]*)(?:</\1>|\Z)", re.IGNORECASE
)  # the end of the text closes a tag too
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_EXPRESSION = re.compile(r"[-+*/()., 0-9]+")
_AROUND = " \t\r\n\"'`"
_CALL = re.compile(r'\{\s*"(?:name|arguments)"')


class ToolMathEnv(LevelGame):
    """Asks for the value of an expression of numbers with three to five digits; a calculator may be called before.

    The first observation is the question, with the forms of the two actions. A calculator call is
    <tool>12 * 3</tool>, or JSON, {"name": "calculator", "arguments": {"expression": "12 * 3"}}, alone or within
    <tool> or <tool_call>, where the arguments may also be the text of that object; its result comes as a chat message
    of role "tool". <answer>36</answer> ends the episode, with reward 1 where it is right. Of several tags the last
    counts. Without a tag, a text that is a number and nothing else is an answer, and an expression a call. A call that
    cannot be calculated is invalid, and its message says why. A state is the set of results so far, whatever the calls.

    See `TextGame` for the arguments.
    """

    won = "Correct."

    def __init__(self, task: object = None, seed: int = 0, max_turns: int = 4, invalid_penalty: float = 0.0) -> None:
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Draws the question."""
        rng = random.Random(f"tool-math|{self.start[0]}")
        self.expression = rng.choice(FORMS).format(*(rng.randint(10 ** rng.randint(2, 4), 99_999) for _ in range(4)))
        self.results: set[str] = set()
        self._said: str | Sequence[Message] = f"What is {self.expression}? {_HELP}"

    def observe(self) -> str | Sequence[Message]:
        """The question, or the reply to the last action."""
        return self._said

    def read(self, text: str) -> str:
        """The whole text: what it asks for is told by more than one tag."""
        return text

    def play(self, action: str) -> bool | None:
        """Calculates, or judges an answer."""
        tags = _TAGS.findall(action)
        kind, content = tags[-1] if tags else ("", action)
        bare = _undressed(content)
        if kind.lower() == "answer" or (not kind and _NUMBER.fullmatch(bare)):
            return self._judge(bare)
        expression = _expression_of(content) or (bare if kind or _EXPRESSION.fullmatch(bare) else None)
        if expression is None:
            self._said = _HELP
            return None
        return self._call(expression)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The results so far, sorted."""
        return ", ".join(sorted(self.results))

    def _judge(self, answer: str) -> bool | None:
        value = whole_number(answer)
        if value is None:
            self._said = _HELP
            return None
        self._said, self.ended = "Wrong.", True
        return value == calculate(self.expression)

    def _call(self, expression: str) -> bool | None:
        try:
            result = shown(calculate(expression))
        except (ValueError, ZeroDivisionError) as error:
            self._said = _reply(f"error: {error}")
            return None
        self._said = _reply(result)
        self.results.add(result)
        return False


def _reply(content: str) -> Sequence[Message]:
    return ({"role": "tool", "content": content},)


def _undressed(text: str) -> str:
    """A text without quotes, backticks and a full stop around it; asterisks on one side alone are signs."""
    text = text.strip(_AROUND).rstrip(_AROUND + ".")
    starred = text[:1] == text[-1:] == "*"
    return text.strip(_AROUND + "*").rstrip(_AROUND + "*.") if starred else text


def _expression_of(text: str) -> str | None:
    """The expression of the last JSON call in a text."""
    decoder = json.JSONDecoder()
    starts = [match.start() for match in _CALL.finditer(text)]
    for start in reversed(starts[-MOST_CALLS:]):
        try:
            arguments: Any = decoder.raw_decode(text, start)[0].get("arguments")
            if isinstance(arguments, str):  # the usual form of an OpenAI endpoint: the text of an object
                arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, Mapping):
            expression = cast(Mapping[str, object], arguments).get("expression")
            if isinstance(expression, str):
                return expression
    return None


def tool_math_suite(
    seed: int = 0, size: int = 200, eval_size: int = 50, max_turns: int = 4, invalid_penalty: float = 0.0
) -> GameSuite:
    """Answer sums that are too large to do in the head, with a calculator to call."""
    game = partial(ToolMathEnv, max_turns=max_turns, invalid_penalty=invalid_penalty)
    return level_suite("tool-math", game, size, eval_size, seed)
