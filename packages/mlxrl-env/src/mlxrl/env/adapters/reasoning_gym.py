"""Tasks of reasoning-gym: a question, one answer, and the task's own scorer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from mlxrl.env.adapters.libraries import load_library
from mlxrl.env.names import unknown
from mlxrl.env.options import check_whole
from mlxrl.env.protocol import RewardWeights, Split, StepResult, check_split
from mlxrl.env.task import Message, Task

INSTRUCTION = "Give the final answer as <answer>...</answer>."

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def reasoning_gym_suite(
    task: str, *, seed: int = 0, size: int = 200, eval_size: int = 50, instruction: str = INSTRUCTION, **parameters: Any
) -> ReasoningGymSuite:
    """Answer questions of a task of reasoning-gym, whose own scorer rewards.

    Args:
        task: a name of reasoning-gym, "letter_counting".
        seed: draws the questions.
        size: number of questions to train on, less those that are evaluated on.
        eval_size: number of evaluation tasks; they are the same whatever `size` is.
        instruction: a line after each question.
        parameters: of the task's dataset, `min_words = 3`.

    Raises:
        ValueError: there is no such task or parameter, one is out of range, or the package is not installed.
    """
    name = f"reasoning-gym:{task}"
    library = load_library("reasoning_gym", "reasoning-gym")
    known: Mapping[str, tuple[Any, Any]] = load_library("reasoning_gym.factory", "reasoning-gym").DATASETS
    if task not in known:
        raise unknown("task of reasoning-gym", task, known)
    options = {field.name for field in fields(known[task][1])} - {"seed", "size"}
    for option in parameters:
        if option not in options:
            raise unknown(f"option of environment {name!r}:", option, options | {"seed", "size", "eval_size"})
    held_out = check_whole("eval_size", eval_size, 0)
    count = check_whole("size", size, 1) + held_out
    try:
        dataset = library.create_dataset(task, seed=check_whole("seed", seed, 0), size=count, **parameters)
    except (AssertionError, TypeError) as error:  # how its datasets refuse their parameters
        raise ValueError(f"environment {name!r}: {error}") from error
    return ReasoningGymSuite(name, dataset, held_out, instruction)


def reasoning_gym_names() -> Sequence[str]:
    """The tasks of reasoning-gym."""
    known: Mapping[str, Any] = load_library("reasoning_gym.factory", "reasoning-gym").DATASETS
    return list(known)


class ReasoningGymSuite:
    """The questions of a dataset of reasoning-gym, each a single turn; it rewards by itself.

    Args:
        name: what the suite goes by.
        dataset: entries with "question" and "answer", and a `score_answer(answer, entry)`.
        held_out: how many of its first entries are evaluated on.
        instruction: a line after each question.
    """

    rewards: RewardWeights = ()

    def __init__(self, name: str, dataset: Any, held_out: int, instruction: str) -> None:
        self.name = name
        self._score = dataset.score_answer
        entries: list[dict[str, Any]] = [dataset[index] for index in range(len(dataset))]
        evaluated = {entry["question"] for entry in entries[:held_out]}
        trained = [entry for entry in entries[held_out:] if entry["question"] not in evaluated]
        self._tasks = {
            split: tuple(
                Task(
                    f"{entry['question']}\n{instruction}".strip(),
                    {"answer": entry["answer"], "entry": entry},
                    f"{split}-{index}",
                )
                for index, entry in enumerate(part)
            )
            for split, part in (("train", trained), ("eval", entries[:held_out]))
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The questions of a split, each with its "answer" and the whole of its "entry" as columns."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> ReasoningGymEnv:
        """A single turn that asks the question."""
        return ReasoningGymEnv(task, self._score)


class ReasoningGymEnv:
    """Asks a question; the answer is what stands in the last <answer>...</answer>, or else all that was said.

    Args:
        task: its column "entry" is what the scorer needs.
        score: score(answer, entry) -> reward.
    """

    max_turns = 1

    def __init__(self, task: Task, score: Any) -> None:
        self._task = task
        self._score = score

    def reset(self) -> str | Sequence[Message]:
        """The question."""
        return self._task.prompt

    def step(self, action: str) -> StepResult:
        """Scores the answer; one that the scorer trips over is as good as none."""
        answer = (_ANSWER.findall(action) or [action])[-1].strip()
        try:
            reward, info = float(self._score(answer, self._task.columns["entry"])), dict[str, object]()
        except Exception as error:  # some scorers do not expect what a model may say
            reward, info = 0.0, {"invalid_action": True, "scorer": f"{type(error).__name__}: {error}"}
        return StepResult("", reward, terminated=True, info=info)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The question."""
        return str(observation)
