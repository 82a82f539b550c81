"""Calls of reward functions: against the clock, and so that what breaks costs the rows that break it and no others."""

import asyncio
import inspect
import math
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from mlxrl.env import Task
from mlxrl.rollout import Trajectory

# Beyond it, squares of rewards leave the range in which group statistics are exact.
LARGEST_REWARD = 1e9
# Rows that may hang when a batch is asked for row by row, of one group and of all; those after them fail unasked, or a
# step might take hours. One row may hang by what it says, two of a group by their task.
MAX_HUNG_OF_GROUP, MAX_HUNG = 2, 6


@dataclass(frozen=True)
class NamedReward:
    """A reward function of a run; `function` None stands for the environment's own return.

    Args:
        name: what it goes by.
        weight: its factor in the total.
        function: scores a batch, see `mlxrl.env.RewardFunction`.
        timeout: seconds that a call may take; 0 sets no bound, and the function then runs in the caller's thread.
    """

    name: str
    weight: float
    function: Callable[..., Any] | None = None
    timeout: float = 30.0


class Failure(NamedTuple):
    """Why a function failed on a row.

    Args:
        kind: what it did, without the values that it did it with, so that it reads the same in every row and step.
        text: the same with an error's own words, where there was one.
        example: those words, or the value that is no reward; empty where there is none.
    """

    kind: str
    text: str
    example: str = ""


@dataclass
class Answers:
    """What a function answered for its rows.

    Args:
        values: one for each row; None where it abstained or failed.
        failures: why it failed, by the number of the row.
        raised: what ended the call, if it did not return.
        retried: why the call with all rows at once failed, where every row alone did not.
    """

    values: list[float | None]
    failures: dict[int, Failure] = field(default_factory=dict)
    raised: BaseException | None = None
    retried: str | None = None


class OverrunError(Exception):
    """A call took longer than it was given; its thread is left behind."""


def ask(reward: NamedReward, trajectories: Sequence[Trajectory]) -> Answers:
    """Have a function score rows, in one call; only where that raises or overruns is each row asked for alone.

    A group of which two rows overrun is asked no more, and after six such rows none is: a function takes at most seven
    times its timeout, besides what calls take that return.

    Args:
        reward: the function.
        trajectories: at least one.
    """
    together = _ask_once(reward, trajectories)
    if together.raised is None or len(trajectories) == 1:
        return together
    answers, hung = Answers([]), Counter[int]()
    for row, trajectory in enumerate(trajectories):
        group = trajectory.group_id
        if hung.total() == MAX_HUNG:
            alone = _unasked(f"{MAX_HUNG} others")
        elif hung[group] == MAX_HUNG_OF_GROUP:
            alone = _unasked(f"{MAX_HUNG_OF_GROUP} of its group")
        else:
            alone = _ask_once(reward, [trajectory])
            hung[group] += isinstance(alone.raised, OverrunError)
        answers.values += alone.values
        if alone.failures:
            answers.failures[row] = alone.failures[0]
    if not answers.failures:
        reason = f"{together.failures[0].text} with {len(trajectories)} rows at once"
        answers.retried = f"{reason}, and was asked again for each row alone"
    return answers


def needed_columns(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns of the data that a function cannot do without: those that it names, or its own `columns` tells."""
    columns: tuple[str, ...] | None = getattr(function, "columns", None)
    if columns is not None:
        return columns
    parameters = inspect.signature(function).parameters.values()
    given = ("prompts", "completions", "completion_ids", "trajectories")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in by_name if p.default is p.empty and p.name not in given)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Make a call in a thread of its own, which is left behind where it takes too long, for it cannot be stopped.

    Args:
        seconds: how long it may take; 0 makes the call in the caller's thread, without a bound.
        call: what to do.

    Raises:
        OverrunError: the call took too long.
    """
    if not seconds:
        return call()
    outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcomes.put((call(), None))
        except BaseException as error:  # handed to whoever waits
            outcomes.put((None, error))

    threading.Thread(target=work, name="mlxrl-reward", daemon=True).start()
    try:
        outcome, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise OverrunError from None
    if error is not None:
        raise error
    return outcome


def _ask_once(reward: NamedReward, trajectories: Sequence[Trajectory]) -> Answers:
    function, count = reward.function, len(trajectories)
    if function is None:
        return _checked([trajectory.environment_return for trajectory in trajectories])
    arguments = _arguments(trajectories)

    def call() -> Any:
        answer = function(**_accepted(function, arguments))
        return _plain(asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer)

    try:
        values = within(reward.timeout, call)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code may raise anything, SystemExit included
        return _failed(count, _described(reward, error), error)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        got = len(values) if isinstance(values, Sequence) and not isinstance(values, str) else type(values).__name__
        return _failed(count, _failure(f"must return a list of {count} rewards, got {got}"))
    return _checked(values)


def _arguments(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    tasks = [trajectory.task for trajectory in trajectories]
    names = dict.fromkeys(name for task in tasks if isinstance(task, Task) for name in task.columns)
    columns = {name: [task.columns.get(name) if isinstance(task, Task) else None for task in tasks] for name in names}
    return {
        "prompts": [_prompt(trajectory) for trajectory in trajectories],
        "completions": [trajectory.completion for trajectory in trajectories],
        "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
        "trajectories": list(trajectories),
        **columns,
    }


def _prompt(trajectory: Trajectory) -> Any:
    """What the model first read; a task of an environment may be but a number."""
    if trajectory.turns:
        return trajectory.turns[0].observation
    return trajectory.task.prompt if isinstance(trajectory.task, Task) else trajectory.task


def _plain(answer: Any) -> Any:
    """An answer with Python's numbers in place of arrays, whose values are computed here if they are lazy."""
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if isinstance(answer, list | tuple):
        return [value.item() if getattr(value, "ndim", None) == 0 else value for value in answer]
    return answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes by name, all of them where it has **columns; but none that is an option."""
    options = function.keywords if isinstance(function, partial) else {}
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        name: value for name, value in arguments.items() if name not in options and (takes_any or name in parameters)
    }


def _checked(values: Sequence[Any]) -> Answers:
    answers = Answers([None] * len(values))
    for row, value in enumerate(values):
        if _is_reward(value):
            answers.values[row] = float(value)
        elif value is not None:
            answers.failures[row] = _refused(value)
    return answers


def _refused(value: Any) -> Failure:
    """Why a value is no reward."""
    if isinstance(value, Exception):
        text = _spelled(str, value)
        return Failure(f"failed with {type(value).__name__}", f"failed: {text}", text)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # or Python warns of each that nobody awaited it
        return _failure(
            "must return numbers, got awaitables; make the function async and return await asyncio.gather(*them)"
        )
    got = f"a {type(value).__name__}"
    if isinstance(value, Real):
        number: Any = value
        got = f"{number:g}" if number != number or abs(number) == math.inf else "one out of range"
    bounds = f"between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
    return _failure(f"must return numbers {bounds} or None, got {got}", _spelled(repr, value))


def _failed(count: int, failure: Failure, raised: BaseException | None = None) -> Answers:
    return Answers([None] * count, dict.fromkeys(range(count), failure), raised)


def _unasked(hung: str) -> Answers:
    return _failed(1, _failure(f"was not asked for this row after {hung} took longer than their time"))


def _failure(kind: str, example: str = "") -> Failure:
    """A failure that no error tells of."""
    return Failure(kind, kind, example)


def _is_reward(value: Any) -> bool:
    number: Any = value
    return isinstance(value, Real) and bool(-LARGEST_REWARD <= number <= LARGEST_REWARD)


def _spelled(spell: Callable[[Any], str], value: object) -> str:
    """A value for a message, on one line and not too long; a user's object may refuse to be spelled."""
    try:
        text = " ".join(spell(value).split())
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _described(reward: NamedReward, error: BaseException) -> Failure:
    """What an error was, and the user's line that raised it."""
    if isinstance(error, OverrunError):
        return _failure(f"took longer than {reward.timeout:g} s")
    said, raised = _spelled(str, error), f"raised {type(error).__name__}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"({Path(frame.filename).name}, line {frame.lineno})"
    return Failure(f"{raised} {where}", f"{raised}: {said} {where}", said)
