"""GRPO: group-standardised rewards under PPO's surrogate."""

from dataclasses import dataclass
from typing import ClassVar

from mlxrl.algo.families import ClippedAlgorithm, GroupRelativeAlgorithm


@dataclass(frozen=True, kw_only=True)
class GRPOAlgorithm(ClippedAlgorithm, GroupRelativeAlgorithm):
    """GRPO, with token_mean and no clips until they are set.

    The paper's own form is reduction "sequence_mean" with clips of 0.2. Source: arXiv 2402.03300, equation 3.
    """

    name: ClassVar[str] = "grpo"
    source: ClassVar[str] = "arXiv 2402.03300"
