"""Prompts that are longer than a run allows: left out and counted, or refused; never cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mlxrl.rollout import ChatEncoder
from mlxrl.train.errors import ConfigError
from mlxrl.train.tasks import Curriculum


class LeftOut(NamedTuple):
    """How many tasks of a split were left out.

    Args:
        split: "train" or "eval".
        dropped: tasks whose prompts are too long.
        tasks: all tasks of the split.
        longest: most tokens that a prompt may have.
    """

    split: Literal["train", "eval"]
    dropped: int
    tasks: int
    longest: int

    def __str__(self) -> str:
        """The same in a sentence."""
        which = "prompts" if self.split == "train" else "held-out prompts"
        return f"{self.dropped} of {self.tasks} {which} are left out, for they have more than {self.longest} tokens."


def leave_out_overlong(
    curriculum: Curriculum, encoder: ChatEncoder, *, longest: int, rule: Literal["drop", "error"]
) -> tuple[Curriculum, tuple[LeftOut, ...]]:
    """The curriculum without the tasks whose prompts are too long, and how many those are.

    Every prompt is encoded once for it. A task that is no `Task` has no prompt that could be too long.

    Args:
        curriculum: the tasks.
        encoder: encodes prompts.
        longest: most tokens that a prompt may have.
        rule: "drop" leaves tasks out; "error" refuses them.

    Raises:
        ConfigError: a prompt is too long and the rule is "error", or a prompt cannot be encoded.
    """
    left_out: list[LeftOut] = []
    kept: dict[str, list[Any]] = {}
    splits: tuple[tuple[Literal["train", "eval"], Sequence[Any]], ...]
    splits = (("train", curriculum.train), ("eval", curriculum.held_out))
    for split, tasks in splits:
        lengths = [_prompt_length(task, encoder) for task in tasks]
        kept[split] = [task for task, length in zip(tasks, lengths, strict=True) if length <= longest]
        dropped = len(tasks) - len(kept[split])
        if dropped and rule == "error":
            task, length = next(found for found in zip(tasks, lengths, strict=True) if found[1] > longest)
            raise ConfigError(
                f"the prompt of task {task.id!r} has {length} tokens and may have {longest}, as {dropped} of "
                f"{len(tasks)} are too long; raise max_prompt_len, shorten them, or set data.overlong = 'drop'."
            )
        if dropped:
            left_out.append(LeftOut(split, dropped, len(tasks), longest))
    return replace(curriculum, train=kept["train"], held_out=kept["eval"]), tuple(left_out)


def _prompt_length(task: Any, encoder: ChatEncoder) -> int:
    prompt = getattr(task, "prompt", None)
    if prompt is None:
        return 0
    try:
        return len(encoder.prompt(prompt))
    except Exception as error:  # chat templates and tokenizers refuse a prompt each in their own way
        raise ConfigError(
            f"the prompt of task {getattr(task, 'id', task)!r} cannot be encoded "
            f"({type(error).__name__}: {error}); mend the prompt, or set use_chat_template = false."
        ) from error
