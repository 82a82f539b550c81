"""The contracts between environments and whoever drives them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from mlxrl.env.task import Message, Task

Split = Literal["train", "eval"]
"""The two halves of a suite's tasks."""

RewardWeights = tuple[tuple[str, float], ...]
"""Names of reward functions with their weights."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    stop = "stop"
    """The answer to a plain prompt ended by itself, with a stop token or a stop text."""
    length = "length"
    """The token limit of an action was reached before it ended: truncated."""
    max_turns = "max_turns"
    """The last allowed turn was played, or the environment reported truncated, without the environment being done."""
    context = "context"
    """The context is full: truncated; where already the prompt is longer than it may be, the trajectory failed."""
    env_done = "env_done"
    """The environment reported that the episode is over."""
    env_error = "env_error"
    """The environment raised, or returned what is no step result: the trajectory failed and is not trained on."""
    timeout = "timeout"
    """The environment took longer than it was given: the trajectory failed and is not trained on."""


@dataclass(frozen=True)
class StepResult:
    """What an action led to.

    Args:
        observation: what the model sees next; text, which becomes one user message, or chat messages.
        reward: the reward of this turn.
        terminated: the episode is over by the environment's own rules.
        truncated: the episode was cut off from outside, by a turn or time limit.
        info: whatever else is known; "invalid_action": True marks an action that could not be read or done.
    """

    observation: str | Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool = False
    info: Mapping[str, object] = field(default_factory=dict[str, object])


@runtime_checkable
class Environment(Protocol):
    """One episode at a time of something a model acts in by text.

    Its methods may be async: whoever drives it through `SyncEnv`, as rollouts do, awaits them, all calls of an
    episode on one event loop. It may have a `close()` besides, which is called once when its episode is over, however
    that came about.
    """

    @property
    def max_turns(self) -> int:
        """The most actions an episode takes."""
        ...

    def reset(self) -> str | Sequence[Message] | tuple[Any, Mapping[str, Any]] | Awaitable[Any]:
        """Starts the episode and returns the first observation, the prompt, or what else `as_observation` accepts."""
        ...

    def step(self, action: str) -> StepResult | tuple[Any, ...] | Awaitable[Any]:
        """Takes the model's text; returns a StepResult, or a tuple that `as_step_result` accepts."""
        ...

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """Names the state that shows as `observation`, given as reset or step returned it; asked before the action.

        Actions from states of equal ids are compared with one another, so the id must not count turns.
        """
        ...


EnvFactory = Callable[[Any, int, int], Environment]
"""factory(task, seed, group_index), called positionally.

The same (task, seed) gives every member of a group the same start; group_index is the place within the group.
"""


@runtime_checkable
class Suite(Protocol):
    """What an environment name stands for: tasks and the environment each is played in."""

    @property
    def name(self) -> str:
        """The name that the suite goes by."""
        ...

    @property
    def rewards(self) -> RewardWeights:
        """The reward functions of a run that names none; empty where the environment rewards by itself."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, the same for the same options and seed."""
        ...

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """The environment of one episode of the task: an EnvFactory."""
        ...


def check_split(split: str) -> None:
    """Refuses anything but the two splits.

    Raises:
        ValueError: split is neither "train" nor "eval".
    """
    if split not in ("train", "eval"):
        raise ValueError(f'split must be "train" or "eval", got {split!r}')
