"""Tasks from a file of JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mlxrl.env.options import check_real, check_text, check_whole
from mlxrl.env.protocol import Environment, RewardWeights, Split, check_split
from mlxrl.env.single_turn import SingleTurnEnv
from mlxrl.env.task import Message, Task, as_messages

RESERVED = ("prompts", "completions", "completion_ids", "trajectories")  # arguments of every reward function


class JsonlSuite:
    """Plain prompts read from JSON lines: one object a line, each a task.

    All columns pass through to the reward functions; a column that a row lacks is None there. The suite cannot know
    how its answers are to be judged, so it has no default reward: name one or more in [[rewards]], since a run
    without any reward is refused.

    Args:
        path: the file of tasks.
        prompt_column: the column to ask: text, or a list of chat messages.
        answer_column: the column that rewards read as `answer`; it may be absent only under its default name.
        eval_path: a second file, whose rows are the evaluation tasks.
        eval_fraction: instead of a second file, the share of the distinct prompts that is kept for evaluation;
            equal prompts stay on one side.
        seed: draws that share.

    Raises:
        ValueError: a file or a column is missing, a line is broken, or an option is out of range.
    """

    name = "jsonl"
    rewards: RewardWeights = ()

    def __init__(
        self,
        path: str,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        eval_path: str | None = None,
        eval_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        fraction = check_real("eval_fraction", eval_fraction, 0.0, below=1.0)
        rng = random.Random(check_whole("seed", seed, 0))
        if eval_path is not None and fraction > 0:
            raise ValueError(f"set eval_path or eval_fraction, not both, got {eval_path!r} and {fraction}")
        columns = check_text("prompt_column", prompt_column), check_text("answer_column", answer_column)
        tasks = _read_tasks(Path(check_text("path", path)), *columns)
        if eval_path is not None:
            held_out = _read_tasks(Path(check_text("eval_path", eval_path)), *columns)
            self._tasks = {"train": tasks, "eval": held_out}
        else:
            kept = _held_out_prompts(tasks, fraction, rng)
            self._tasks = {
                "train": tuple(task for task in tasks if _prompt_key(task) not in kept),
                "eval": tuple(task for task in tasks if _prompt_key(task) in kept),
            }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, in the order of the file."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """A single turn that asks the prompt."""
        return SingleTurnEnv(task)


def _prompt_key(task: Task) -> str:
    return json.dumps(task.prompt)


def _held_out_prompts(tasks: Sequence[Task], fraction: float, rng: random.Random) -> set[str]:
    if fraction == 0:
        return set()
    prompts = list(dict.fromkeys(_prompt_key(task) for task in tasks))
    if len(prompts) < 2:
        raise ValueError(f"eval_fraction {fraction} needs at least 2 distinct prompts, got {len(prompts)}; add rows")
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    return set(rng.sample(prompts, count))


def _read_tasks(path: Path, prompt_column: str, answer_column: str) -> tuple[Task, ...]:
    rows = _read_rows(path)
    columns = list(dict.fromkeys(column for _, row in rows for column in row))
    for column in columns:
        if column in RESERVED:
            raise ValueError(f"{path} has a column {column!r}, which is an argument of reward functions; rename it")
    has_answer = answer_column in columns or answer_column != "answer"
    tasks: list[Task] = []
    for line, row in rows:
        for column in (prompt_column, answer_column) if has_answer else (prompt_column,):
            if row.get(column) is None:
                raise ValueError(
                    f"{path} line {line} has no value in column {column!r} (its columns: {', '.join(row) or 'none'}); "
                    "name the right one with prompt_column or answer_column"
                )
        answer = {"answer": row[answer_column]} if has_answer else {}
        prompt = _as_prompt(row[prompt_column], prompt_column, path, line)
        tasks.append(Task(prompt, dict.fromkeys(columns) | row | answer, f"{path.name}:{line}"))
    return tuple(tasks)


def _as_prompt(value: object, column: str, path: Path, line: int) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        try:
            return as_messages(cast(object, value))
        except TypeError as error:
            raise ValueError(f"{path} line {line}, column {column!r}: {error}") from None
    raise ValueError(
        f"{path} line {line}, column {column!r} must be text or a list of chat messages, and not empty, got {value!r}"
    )


def _read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"the file {path} does not exist; correct the path (relative to {Path.cwd()})")
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row: object = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path} line {line} is not JSON ({error}); write one object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {line} must be an object, got {type(row).__name__}; write one object a line")
        rows.append((line, cast(dict[str, Any], row)))
    if not rows:
        raise ValueError(f'{path} has no rows; write one JSON object a line, for example {{"prompt": "2+2?"}}')
    return rows
