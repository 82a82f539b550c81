"""Tasks from a file or a dataset."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from mlxrl.env.options import check_real, check_text, check_whole
from mlxrl.env.prompts import PromptTemplate, as_prompt, with_system
from mlxrl.env.protocol import Environment, RewardWeights, Split, check_split
from mlxrl.env.single_turn import SingleTurnEnv
from mlxrl.env.tables import Row, Table, read_table
from mlxrl.env.task import Message, Task

RESERVED = ("prompts", "completions", "completion_ids", "trajectories")  # arguments of every reward function


class DatasetSuite:
    """Plain prompts read from a table: one row, one task; two equal rows are two tasks.

    All columns pass through to the reward functions; a column that a row lacks is None there. What is asked and the
    answer stay text in a CSV file, whatever they look like. The suite cannot know
    how its answers are to be judged, so it has no default reward: name one or more in [[rewards]], since a run
    without any reward is refused.

    Args:
        path: the file, folder or "hf:owner/name" of the tasks; see `read_table`.
        format: how a file is written, where its name does not say so.
        split: the part of a dataset of several.
        subset: the configuration of a dataset of the hub.
        prompt_column: the column to ask: text, or a list of chat messages.
        answer_column: the column that rewards read as `answer`; it may be absent only under its default name.
        columns: further names for columns: what rewards read, and the column it is. "prompt" and "answer" stand for
            the two options above. A column of the table that has such a name gives way to it.
        system_prompt: a system message before every prompt.
        prompt_template: what to ask instead of a prompt column: a text with columns in braces; see `PromptTemplate`.
        eval_path: a second table, whose rows are the evaluation tasks.
        eval_split: the split that holds them, of `eval_path` or else of `path`.
        eval_fraction: instead, the share of the distinct prompts that is kept for evaluation; equal prompts stay on
            one side.
        seed: draws that share.

    Raises:
        ValueError: the table or a column cannot be had, a row is broken, or an option is out of range.
    """

    name = "dataset"
    rewards: RewardWeights = ()

    def __init__(
        self,
        path: str,
        format: str | None = None,
        split: str | None = None,
        subset: str | None = None,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        columns: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        eval_path: str | None = None,
        eval_split: str | None = None,
        eval_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        fraction = check_real("eval_fraction", eval_fraction, 0.0, below=1.0)
        rng = random.Random(check_whole("seed", seed, 0))
        for name, value in (("eval_path", eval_path), ("eval_split", eval_split)):
            if value is not None and fraction > 0:
                raise ValueError(f"set {name} or eval_fraction, not both, got {value!r} and {fraction}")
        self._system = None if system_prompt is None else check_text("system_prompt", system_prompt)
        self._template = None if prompt_template is None else PromptTemplate(prompt_template)
        self._columns = _renamed(prompt_column, answer_column, columns or {}, asks=self._template is None)
        self._needed = {name for name, column in self._columns.items() if (name, column) != ("answer", "answer")}
        asked = (self._columns["prompt"],) if self._template is None else self._template.columns
        texts = {*asked, self._columns["answer"]}
        tasks = self._read(read_table(check_text("path", path), format, split, subset, texts))
        if eval_path is not None or eval_split is not None:
            where = path if eval_path is None else check_text("eval_path", eval_path)
            part = subset if eval_path is None else None
            held_out = self._read(read_table(where, format, eval_split, part, texts))
            self._tasks = {"train": tasks, "eval": held_out}
        else:
            kept = _held_out_prompts(tasks, fraction, rng)
            self._tasks = {
                "train": tuple(task for task in tasks if _prompt_key(task) not in kept),
                "eval": tuple(task for task in tasks if _prompt_key(task) in kept),
            }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, in the order of the table."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """A single turn that asks the prompt."""
        return SingleTurnEnv(task)

    def _read(self, table: Table) -> tuple[Task, ...]:
        present = table.columns
        for column in present:
            if column in RESERVED:
                raise ValueError(
                    f"{table.source} has a column {column!r}, which is an argument of reward functions; rename it"
                )
        named = {name: column for name, column in self._columns.items() if column in present or name in self._needed}
        for name in named.keys() - {"prompt"}:
            if named[name] not in present:
                option = "answer_column" if name == "answer" else f"columns.{name}"
                raise ValueError(
                    f"{table.source} has no column {named[name]!r} (its columns: {', '.join(present)}), "
                    f"which {option} names; name another"
                )
        asked = self._template.columns if self._template is not None else (named["prompt"],)
        tasks: list[Task] = []
        for number, row in table.rows:
            place = table.place(number)
            if "prompt" in named and row.get(named["prompt"]) is None:
                raise ValueError(
                    f"{place} has no value in column {named['prompt']!r} (its columns: {', '.join(row) or 'none'}); "
                    "name the right one with prompt_column"
                )
            try:
                prompt = self._prompt(row)
            except ValueError as error:
                raise ValueError(f"{place}, column {', '.join(map(repr, asked))}: {error}") from None
            renamed = {name: row.get(column) for name, column in named.items() if name != "prompt"}
            tasks.append(Task(prompt, dict.fromkeys(present) | row | renamed, f"{table.name}:{number}"))
        return tuple(tasks)

    def _prompt(self, row: Row) -> str | tuple[Message, ...]:
        template = self._template
        prompt = as_prompt(row[self._columns["prompt"]] if template is None else template.fill(row))
        return prompt if self._system is None else with_system(prompt, self._system)


def _renamed(prompt_column: str, answer_column: str, columns: Mapping[str, str], *, asks: bool) -> dict[str, str]:
    """The columns by the names that stand for them; "prompt" only where a column is asked."""
    names = {"prompt": check_text("prompt_column", prompt_column), "answer": check_text("answer_column", answer_column)}
    for name, column in columns.items():
        check_text(f"columns.{name}", column)
        if name in RESERVED:
            raise ValueError(f"columns.{name} is an argument of reward functions; choose another name")
        if names.get(name, name) != name:
            raise ValueError(f"set columns.{name} or {name}_column, not both, got {column!r} and {names[name]!r}")
    names |= columns
    if asks:
        return names
    prompt = names.pop("prompt")
    if prompt != "prompt":
        raise ValueError(f"set prompt_template or the prompt's column, not both, got the column {prompt!r}")
    return names


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
