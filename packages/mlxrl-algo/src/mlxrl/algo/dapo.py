"""DAPO: GRPO with a higher upper clip, token mean and dynamic sampling."""

from dataclasses import dataclass
from typing import ClassVar

from mlxrl.algo.batch import AlgorithmBatch
from mlxrl.algo.families import ClippedAlgorithm, GroupRelativeAlgorithm
from mlxrl.algo.filters import informative_rows
from mlxrl.algo.groups import GroupStructure
from mlxrl.algo.options import option


@dataclass(frozen=True, kw_only=True)
class DAPOAlgorithm(ClippedAlgorithm, GroupRelativeAlgorithm):
    """DAPO: clips of 0.2 below and 0.28 above, no KL, and only groups whose rewards differ.

    Source: arXiv 2503.14476, equations 8 to 12.

    Attributes:
        dynamic_sampling: drop the groups whose task rewards are all equal.
    """

    name: ClassVar[str] = "dapo"
    source: ClassVar[str] = "arXiv 2503.14476"

    clip_low: float | None = option(0.2, 0, 1, "(]")
    clip_high: float | None = option(0.28, 0, ends="()")
    dynamic_sampling: bool = True

    def filter_batch(self, batch: AlgorithmBatch, group_structure: GroupStructure | None = None) -> list[int] | None:
        """Return the rows of the groups whose rewards differ; `batch` holds the task rewards, before any shaping."""
        if not self.dynamic_sampling:
            return None
        return informative_rows(batch.total_rewards, batch.group_ids if group_structure is None else group_structure)
