"""Any environment as a plain one: what is async is awaited, and what comes back is checked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Hashable, Sequence
from typing import Any

from mlxrl.env.protocol import Environment, StepResult
from mlxrl.env.step import as_observation, as_step_result
from mlxrl.env.task import Message


class SyncEnv:
    """An environment whose methods return at once what they are to return, and nothing that has to be looked into.

    Where a method of the given environment is async, it runs on an event loop of this environment's own, in the
    thread that calls; no other loop may be running there. The loop lives until `close`, so locks, queues and tasks
    made in `reset` are there in `step`; it stands still between the calls.

    Args:
        environment: the environment to play.
        max_turns: the most actions of an episode, where that is less than the environment's own.
    """

    def __init__(self, environment: Environment, max_turns: int | None = None) -> None:
        self._environment = environment
        self._max_turns = max_turns
        self._turns = 0
        self._runner: asyncio.Runner | None = None
        self._closed = False

    @property
    def max_turns(self) -> int:
        """The most actions an episode takes."""
        return self._environment.max_turns if self._max_turns is None else self._max_turns

    def reset(self) -> str | Sequence[Message]:
        """Starts the episode and returns the first observation; raises what `as_observation` raises."""
        self._turns = 0
        return as_observation(self._awaited(self._environment.reset()))

    def step(self, action: str) -> StepResult:
        """Takes the model's text; raises what `as_step_result` raises."""
        value = self._awaited(self._environment.step(action))
        self._turns += 1
        return as_step_result(value, last=self._turns >= self.max_turns)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """Names the state that shows as `observation`.

        Raises:
            TypeError: the name cannot be hashed.
        """
        name = self._awaited(self._environment.state_id(observation))
        hash(name)
        return name

    def close(self) -> None:
        """Has the environment close itself, where it has a `close`; cancels what is left on its event loop and ends it.

        Twice is once; not while a call runs.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._awaited(getattr(self._environment, "close", bool)())
        finally:
            if self._runner is not None:
                self._runner.close()

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_outcome(value))


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
