"""Calls into an environment, which is user code: it may raise anything, and the record names the user's line."""

import sysconfig
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from mlxrl.env import Message, StepResult, SyncEnv

T = TypeVar("T")

# Characters of an environment's error that the record keeps.
MOST_SAID = 500
# Where code lies that is not the user's own.
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class EnvironmentFailedError(Exception):
    """User code raised, or returned what it must not; the message says where and what, and names the user's line.

    `result` is what the step gave before that, if anything.
    """

    result: StepResult | None = None

    def __init__(self, where: str, error: BaseException):
        told = f"{where} of the environment raised {type(error).__name__}: {_said(error)}"
        super().__init__(told + _place(error.__traceback__))


def asked(where: str, call: Callable[[], T]) -> T:
    """What the call returns; where names it in the error, which may be anything that user code raises."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything: the row fails, the run goes on
        raise EnvironmentFailedError(where, error) from error


def checked_state_id(environment: SyncEnv, observation: str | Sequence[Message]) -> Hashable:
    """The name of a state; one that cannot be compared or spelled, as algorithms and records do, raises here."""
    state_id = environment.state_id(observation)
    if state_id is not None and f"{state_id!r} {state_id!s}" and not state_id == state_id:
        raise ValueError("a state_id must be equal to itself")
    return state_id


def own_copy(result: StepResult) -> StepResult:
    """The result with an info of its own, which the environment may go on to change."""
    return replace(result, info=dict(result.info))


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, or else of a library; nothing where only mlxrl's was running."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if not str(frame.f_globals.get("__name__")).startswith("mlxrl.")
    ]
    own = [(file, line) for file, line in lines if not file.startswith((*LIBRARIES, "<"))]
    return "".join(f" ({Path(file).name}, line {line})" for file, line in (own or lines)[-1:])


def _said(error: BaseException) -> str:
    """What an error says of itself, which may fail too, and may be long."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code again
        return "it cannot say why"
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]} ..."
