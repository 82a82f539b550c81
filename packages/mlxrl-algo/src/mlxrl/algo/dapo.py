"""DAPO: GRPO with a higher upper clip, token mean and dynamic sampling."""

from dataclasses import dataclass
from typing import ClassVar

from mlxrl.algo.families import ClippedAlgorithm, GroupRelativeAlgorithm
from mlxrl.algo.options import option


@dataclass(frozen=True, kw_only=True)
class DAPOAlgorithm(ClippedAlgorithm, GroupRelativeAlgorithm):
    """DAPO: clips of 0.2 below and 0.28 above, no KL, and only groups whose rewards differ.

    Source: arXiv 2503.14476, equations 8 to 12.
    """

    name: ClassVar[str] = "dapo"
    source: ClassVar[str] = "arXiv 2503.14476"

    clip_low: float | None = option(0.2, 0, 1, "(]")
    clip_high: float | None = option(0.28, 0, ends="()")
    dynamic_sampling: bool = True
