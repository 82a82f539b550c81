"""What the small text games share: starts, turns, how an action is read, and their suites."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, cast

from mlxrl.env.options import check_real, check_whole
from mlxrl.env.protocol import RewardWeights, Split, StepResult, check_split
from mlxrl.env.task import Message, Task

Start = tuple[int, ...]
"""The numbers that fix how an episode starts."""

ACTION_TAG = re.compile(r"<action>([^<>]*)(?:</action>|\Z)", re.IGNORECASE)
"""What stands inside <action>...</action>; the end of the text closes it too."""

_AROUND = " \t\r\n\"'`*"  # an action: blanks, quotes, and what Markdown puts there


def read_action(text: str) -> str:
    """What the last tag of a text holds, or without a tag the text itself, to be nothing but an action.

    It comes in small letters, without the blanks, quotes, backticks, asterisks, full stops and exclamation marks that
    may stand around it.
    """
    tagged = ACTION_TAG.findall(text)
    said: str = tagged[-1] if tagged else text
    return said.strip(_AROUND).rstrip(_AROUND + ".!").lower()


class TextGame(ABC):
    """An episode that starts from one of a few starts and is won by reaching its goal.

    Winning brings reward 1. An action that cannot be read or done changes nothing but the turn count; its result has
    "invalid_action": True in info. The last allowed turn, when it does not end the game, reports truncated. A game
    that is over without being won sets `ended` in `play`.

    Args:
        task: a Task whose column "start" is one of `starts` fixes the start; with any other task it is drawn from
            the task (its id, if it is a Task) and the seed.
        seed: see `task`.
        max_turns: the most actions of an episode.
        invalid_penalty: taken off the reward of a turn whose action is invalid.

    Raises:
        ValueError: an option is out of range, or the task names a start that is none of `starts`.
    """

    starts: ClassVar[tuple[Start, ...]]
    least_turns: int = 1
    won: ClassVar[str] = "Solved."
    ended: bool = False

    def __init__(self, task: object, seed: int, max_turns: int, invalid_penalty: float) -> None:
        self.max_turns = check_whole("max_turns", max_turns, self.least_turns)
        self.invalid_penalty = check_real("invalid_penalty", invalid_penalty, 0.0)
        self.start = self._start_of(task, seed)
        self._turn = 0
        self._over = True

    @abstractmethod
    def begin(self) -> None:
        """Sets the state that `self.start` names."""

    @abstractmethod
    def observe(self) -> str | Sequence[Message]:
        """The observation of the present state."""

    @abstractmethod
    def play(self, action: str) -> float | None:
        """Does an action: True where it wins, None where it is invalid, and else its reward; False is none."""

    def read(self, text: str) -> str:
        """The action in the model's text, as `play` gets it."""
        return read_action(text)

    def draw_start(self, rng: random.Random) -> Start:
        """A start drawn at random."""
        return rng.choice(self.starts)

    def check_start(self, name: str, start: Start) -> None:
        """Refuses what is no start of this game.

        Raises:
            ValueError: start is none; name says what holds it.
        """
        if start not in self.starts:
            raise ValueError(f"{name} must be one of {self.starts}, got {start}")

    def reset(self) -> str | Sequence[Message]:
        """Starts over from the same start and returns its observation."""
        self._turn, self._over, self.ended = 0, False, False
        self.begin()
        return self.observe()

    def step(self, action: str) -> StepResult:
        """Plays one turn with the model's text.

        Raises:
            RuntimeError: the episode is over, or was never started.
        """
        if self._over:
            raise RuntimeError("step needs a running episode, but this one is over or not yet started; call reset()")
        self._turn += 1
        outcome = self.play(self.read(action))
        terminated = outcome is True or self.ended
        truncated = not terminated and self._turn == self.max_turns
        self._over = terminated or truncated
        return StepResult(
            observation=self.won if outcome is True else self.observe(),
            reward=0.0 - self.invalid_penalty if outcome is None else float(outcome),
            terminated=terminated,
            truncated=truncated,
            info={"invalid_action": outcome is None},
        )

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The observation itself, which tells all there is to know and no turn count."""
        return cast(str, observation)

    def _start_of(self, task: object, seed: int) -> Start:
        if isinstance(task, Task):
            if "start" in task.columns:
                start = tuple(cast(Sequence[int], task.columns["start"]))
                self.check_start(f"column 'start' of task {task.id!r}", start)
                return start
            task = task.id
        return self.draw_start(random.Random(f"{task}|{seed}"))


def held_out_quarter(starts: Sequence[Start], seed: int) -> tuple[tuple[Start, ...], tuple[Start, ...]]:
    """Shuffles starts under a seed and keeps a quarter of them for evaluation: (train, eval)."""
    shuffled = random.Random(check_whole("seed", seed, 0)).sample(starts, len(starts))
    count = len(shuffled) // 4
    return tuple(shuffled[count:]), tuple(shuffled[:count])


class GameSuite:
    """A text game with the starts to train on and those to evaluate on; it rewards by itself.

    Args:
        name: what the suite goes by.
        game: game(task, seed) -> environment.
        train: starts of the training tasks.
        held_out: starts of the evaluation tasks.
    """

    rewards: RewardWeights = ()

    def __init__(
        self, name: str, game: Callable[[Task, int], TextGame], train: Sequence[Start], held_out: Sequence[Start]
    ) -> None:
        self.name = name
        self._game = game
        self._tasks = {
            split: tuple(self._task(start, f"{split}-{index}") for index, start in enumerate(starts))
            for split, starts in (("train", train), ("eval", held_out))
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        """One task for each start of a split; its prompt is the first observation."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> TextGame:
        """The game from the task's start, whatever the seed, which draws only what is left to chance later."""
        return self._game(task, seed)

    def _task(self, start: Start, name: str) -> Task:
        columns = {"start": start}
        opening = self._game(Task("", columns, name), 0).reset()
        return Task(opening if isinstance(opening, str) else tuple(opening), columns, name)
