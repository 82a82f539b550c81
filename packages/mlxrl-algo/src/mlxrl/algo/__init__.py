"""Policy-gradient losses on MLX: advantages, ratios, surrogates, KL, reductions and the algorithms made of them."""

from mlxrl.algo import _platform as _platform
from mlxrl.algo.advantages import (
    CONSTANT_TOLERANCE,
    centred_advantages,
    gdpo_advantages,
    is_constant,
    leave_one_out_advantages,
    maxrl_advantages,
    standardised_advantages,
    weighted_rewards,
)
from mlxrl.algo.algorithm import Algorithm, LossOutput, TrajectoryAlgorithm, TrajectoryLike, TurnLike
from mlxrl.algo.anchors import anchor_ids, anchor_metrics
from mlxrl.algo.base import PolicyGradientAlgorithm
from mlxrl.algo.batch import AlgorithmBatch, Role
from mlxrl.algo.catalogue import algorithm_table
from mlxrl.algo.cispo import CISPOAlgorithm
from mlxrl.algo.corrections import Correction, CorrectionLevel, masked_weights, sampler_ratio, truncated_weights
from mlxrl.algo.dapo import DAPOAlgorithm
from mlxrl.algo.drgrpo import DrGRPOAlgorithm
from mlxrl.algo.echo import EchoSchedule, echo_loss, echo_weights
from mlxrl.algo.families import ClippedAlgorithm, GroupRelativeAlgorithm
from mlxrl.algo.filters import informative_rows, mask_truncated
from mlxrl.algo.gigpo import GiGPOAlgorithm
from mlxrl.algo.gmpo import GMPOAlgorithm
from mlxrl.algo.groups import GroupStructure, group_ids_of, group_members
from mlxrl.algo.grpo import GRPOAlgorithm
from mlxrl.algo.gspo import GSPOAlgorithm
from mlxrl.algo.kl import KLEstimator, KLPlacement, kl_k1, kl_k2, kl_k3, kl_penalty
from mlxrl.algo.options import option
from mlxrl.algo.ratios import geometric_ratio, geometric_token_ratio, log_ratio, sequence_ratio, token_ratio
from mlxrl.algo.reductions import (
    REDUCTIONS,
    SEQUENCE_MAX_TOKENS,
    SEQUENCE_MEAN,
    SEQUENCE_SUM,
    STEP_MEAN,
    TOKEN_MEAN,
    Reduction,
    ReductionTotals,
    reduction_totals,
    reduction_weights,
)
from mlxrl.algo.registry import algorithm_class, algorithm_names, algorithm_options, make_algorithm, register_algorithm
from mlxrl.algo.reinforcepp import REINFORCEPPAlgorithm
from mlxrl.algo.returns import discounted_returns, paint_tokens, reinforcepp_returns, whitened
from mlxrl.algo.rloo import RLOOAlgorithm
from mlxrl.algo.sapo import SAPOAlgorithm
from mlxrl.algo.shaping import charge_kl, soft_overlong_penalties, token_kl
from mlxrl.algo.surrogates import (
    cispo_surrogate,
    clipped_surrogate,
    gmpo_surrogate,
    is_clipped,
    sapo_surrogate,
    unclipped_surrogate,
)

__all__ = [
    "CONSTANT_TOLERANCE",
    "REDUCTIONS",
    "SEQUENCE_MAX_TOKENS",
    "SEQUENCE_MEAN",
    "SEQUENCE_SUM",
    "STEP_MEAN",
    "TOKEN_MEAN",
    "Algorithm",
    "AlgorithmBatch",
    "CISPOAlgorithm",
    "ClippedAlgorithm",
    "Correction",
    "CorrectionLevel",
    "DAPOAlgorithm",
    "DrGRPOAlgorithm",
    "EchoSchedule",
    "GMPOAlgorithm",
    "GRPOAlgorithm",
    "GSPOAlgorithm",
    "GiGPOAlgorithm",
    "GroupRelativeAlgorithm",
    "GroupStructure",
    "KLEstimator",
    "KLPlacement",
    "LossOutput",
    "PolicyGradientAlgorithm",
    "REINFORCEPPAlgorithm",
    "RLOOAlgorithm",
    "Reduction",
    "ReductionTotals",
    "Role",
    "SAPOAlgorithm",
    "TrajectoryAlgorithm",
    "TrajectoryLike",
    "TurnLike",
    "algorithm_class",
    "algorithm_names",
    "algorithm_options",
    "algorithm_table",
    "anchor_ids",
    "anchor_metrics",
    "centred_advantages",
    "charge_kl",
    "cispo_surrogate",
    "clipped_surrogate",
    "discounted_returns",
    "echo_loss",
    "echo_weights",
    "gdpo_advantages",
    "geometric_ratio",
    "geometric_token_ratio",
    "gmpo_surrogate",
    "group_ids_of",
    "group_members",
    "informative_rows",
    "is_clipped",
    "is_constant",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_penalty",
    "leave_one_out_advantages",
    "log_ratio",
    "make_algorithm",
    "mask_truncated",
    "masked_weights",
    "maxrl_advantages",
    "option",
    "paint_tokens",
    "reduction_totals",
    "reduction_weights",
    "register_algorithm",
    "reinforcepp_returns",
    "sampler_ratio",
    "sapo_surrogate",
    "sequence_ratio",
    "soft_overlong_penalties",
    "standardised_advantages",
    "token_kl",
    "token_ratio",
    "truncated_weights",
    "unclipped_surrogate",
    "weighted_rewards",
    "whitened",
]
