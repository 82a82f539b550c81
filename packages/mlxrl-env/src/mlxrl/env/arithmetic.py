"""Sums of digits: the smallest task whose answers can be verified."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from mlxrl.env.options import check_whole
from mlxrl.env.protocol import Environment, RewardWeights, Split, check_split
from mlxrl.env.single_turn import SingleTurnEnv
from mlxrl.env.task import Task

FRUITLESS_DRAWS = 20_000  # in a row, before held-out problems count as used up


def is_held_out(problem: str) -> bool:
    """Whether a sum, written as in "7+5+8+3", is kept for evaluation: one in ten, by its exact order of digits."""
    return zlib.crc32(("h" + problem).encode()) % 10 == 0


class ArithmeticSuite:
    """Asks "What is 7+5+8+3?"; the columns are the answer "23" and the question.

    Training tasks are drawn with replacement and never held out; evaluation tasks are held out and distinct.

    Args:
        seed: draws the problems.
        size: number of training tasks.
        eval_size: number of evaluation tasks.
        terms: least and greatest number of digits (1 to 9) in a sum.

    Raises:
        ValueError: an option is out of range, or there are not `eval_size` held-out problems.
    """

    name = "arithmetic"
    rewards: RewardWeights = (("answer_tag", 1.0),)

    def __init__(self, seed: int = 0, size: int = 2000, eval_size: int = 200, terms: Sequence[int] = (3, 5)) -> None:
        least, most = _check_terms(terms)
        rng = random.Random(check_whole("seed", seed, 0))
        train = _draw_train(rng, check_whole("size", size, 1), least, most)
        held_out = _draw_held_out(rng, check_whole("eval_size", eval_size, 0), least, most)
        self._tasks = {
            split: tuple(_task(problem, f"{split}-{index}") for index, problem in enumerate(problems))
            for split, problems in (("train", train), ("eval", held_out))
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The sums of a split."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """A single turn that asks the sum."""
        return SingleTurnEnv(task)


def _check_terms(terms: Sequence[int]) -> tuple[int, int]:
    if not isinstance(terms, list | tuple) or len(terms) != 2:
        raise ValueError(f"terms must be the least and the greatest number of digits, as in [3, 5], got {terms!r}")
    least = check_whole("terms[0]", terms[0], 2)
    return least, check_whole("terms[1]", terms[1], least)


def _draw_problem(rng: random.Random, least: int, most: int) -> str:
    return "+".join(str(rng.randint(1, 9)) for _ in range(rng.randint(least, most)))


def _draw_train(rng: random.Random, size: int, least: int, most: int) -> list[str]:
    problems: list[str] = []
    while len(problems) < size:
        problem = _draw_problem(rng, least, most)
        if not is_held_out(problem):
            problems.append(problem)
    return problems


def _draw_held_out(rng: random.Random, size: int, least: int, most: int) -> list[str]:
    problems: dict[str, None] = {}  # a set that keeps the order
    fruitless = 0
    while len(problems) < size:
        problem = _draw_problem(rng, least, most)
        if is_held_out(problem) and problem not in problems:
            problems[problem] = None
            fruitless = 0
        else:
            fruitless += 1
        if fruitless == FRUITLESS_DRAWS:
            raise ValueError(
                f"eval_size must not exceed the held-out sums of {least} to {most} digits, got {size} "
                f"but found {len(problems)}; lower eval_size or widen terms"
            )
    return list(problems)


def _task(problem: str, name: str) -> Task:
    question = f"What is {problem}?"
    answer = str(sum(int(digit) for digit in problem.split("+")))
    return Task(prompt=question, columns={"answer": answer, "question": question}, id=name)
