r"""A reward for answers in mathematics: by their value with math-verify, or as they are written without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from mlxrl.env.numbers import marked_answer
from mlxrl.env.options import check_real
from mlxrl.env.rewards_math import math_match
from mlxrl.env.rewards_rows import is_whole
from mlxrl.env.workers import WorkerError, WorkerPool

COMPARISONS = ("auto", "math-verify", "as-written")
MOST_WORKERS = 4


class MathReward:
    r"""1 where the completion's answer equals the column `answer`, and 0 elsewhere.

    With math-verify (`pip install "mlxrl-env[math]"`) 2(x + 1) is 2x + 2 and sets, intervals and matrices are read;
    without it, the two are compared as `math_match` does. Where nothing in a completion is marked as its answer, what
    math-verify finds in it may be the answer, or all of it. The comparison runs in processes of its own, and a row for
    which it takes too long fails. A row whose answer is None, blank or unreadable is not scored (None); a truncated
    trajectory gets 0.

    Args:
        comparison: "math-verify", "as-written", or "auto": the former where it is installed.
        seconds: how long the comparison of one row may take.

    Raises:
        ValueError: there is no such comparison, or it is not installed.
    """

    bounded = True
    columns = ("answer",)

    def __init__(self, comparison: str = "auto", seconds: float = 5.0) -> None:
        if comparison not in COMPARISONS:
            raise ValueError(f"comparison must be one of {', '.join(COMPARISONS)}, got {comparison!r}")
        if check_real("seconds", seconds, 0.0) == 0:
            raise ValueError("seconds must be above 0, got 0")
        installed = importlib.util.find_spec("math_verify") is not None
        if comparison == "math-verify" and not installed:
            raise ValueError("comparison = 'math-verify' is not installed; pip install \"mlxrl-env[math]\"")
        self._pool: WorkerPool | None = None
        self.scored_by = "answers as they are written; math-verify is not installed"
        if comparison == "as-written":
            self.scored_by = "answers as they are written"
        elif installed:
            self.scored_by = f"math-verify {importlib.metadata.version('math-verify')}"
            count = min(MOST_WORKERS, os.cpu_count() or 1)
            self._pool = WorkerPool([sys.executable, "-P", "-m", "mlxrl.env.math_worker"], count, seconds)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Sequence[Any] | None = None,
        *,
        answer: Sequence[Any],
        **columns: Any,
    ) -> list[float | WorkerError | None]:
        """Scores a batch."""
        if self._pool is None:
            return [*math_match(prompts, completions, completion_ids, trajectories, answer=answer)]
        rewards: list[float | WorkerError | None] = [0.0] * len(completions)
        asked: list[int] = []
        for row, (completion, value) in enumerate(zip(completions, answer, strict=True)):
            if value is None or not str(value).strip():
                rewards[row] = None
            elif completion.strip() and (trajectories is None or is_whole(trajectories[row])):
                asked.append(row)
        verdicts = self._pool.ask([(_boxed(str(answer[row])), _readings(completions[row])) for row in asked])
        for row, verdict in zip(asked, verdicts, strict=True):
            rewards[row] = verdict if verdict is None or isinstance(verdict, WorkerError) else float(verdict)
        return rewards


def _boxed(text: str) -> str:
    """A text's answer in a form that math-verify takes for one."""
    return rf"\boxed{{{marked_answer(text).strip().strip('$')}}}"


def _readings(completion: str) -> list[str]:
    """The marked answer of a completion; without one, all of it: to look through, and as the answer."""
    boxed = _boxed(completion)
    return [completion, boxed] if marked_answer(completion) == completion else [boxed]
