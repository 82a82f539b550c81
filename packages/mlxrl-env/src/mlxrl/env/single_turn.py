"""The environment of a plain prompt: one question, one answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mlxrl.env.protocol import StepResult
from mlxrl.env.task import Message, Task, as_messages


class SingleTurnEnv:
    """Asks a task's prompt and ends with the first answer; reward functions score it afterwards.

    Args:
        task: the task whose prompt is asked.
    """

    max_turns = 1

    def __init__(self, task: Task) -> None:
        self.task = task

    def reset(self) -> str | Sequence[Message]:
        """The task's prompt."""
        return self.task.prompt

    def step(self, action: str) -> StepResult:
        """Ends the episode with reward 0, whatever the answer."""
        return StepResult(observation="", reward=0.0, terminated=True)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The prompt itself, as roles and texts."""
        return tuple((message["role"], message["content"]) for message in as_messages(observation))
