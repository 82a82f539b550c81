"""[algorithm]: from config fields to an algorithm of the registry, by name and options alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import mlx.core as mx
from pydantic import Field

from mlxrl.algo import (
    Algorithm,
    AlgorithmBatch,
    Correction,
    KLEstimator,
    algorithm_class,
    algorithm_options,
    make_algorithm,
)
from mlxrl.train.sections import Section

if TYPE_CHECKING:
    from mlxrl.train.config import TrainConfig

# Fields that belong to one algorithm: its name, and its option's own name.
OWNED = {
    "dapo_dynamic_sampling": ("dapo", "dynamic_sampling"),
    "gspo_importance": ("gspo", "importance"),
    "drgrpo_normalize_rewards": ("dr-grpo", "normalize"),
    "drgrpo_loss_reduction": ("dr-grpo", "reduction"),
    "drgrpo_max_tokens": ("dr-grpo", "max_tokens"),
    "gigpo_omega": ("gigpo", "omega"),
    "gigpo_gamma": ("gigpo", "gamma"),
    "gigpo_normalization": ("gigpo", "normalization"),
}
# Fields that several algorithms share under the same name.
SHARED = ("clip_low", "clip_high", "reduction", "advantage", "ddof", "dynamic_sampling")
# What clips an algorithm without clips of its own gets once a batch is used more than once.
REUSE_CLIP = 0.2


class AlgorithmConfig(Section):
    """[algorithm]: the objective."""

    name: str = "grpo"
    """A name of `mlxrl.algo.algorithm_names()`; case, - and _ do not count."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower clip of the ratio, as a distance from 1; by default the algorithm's own."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip of the ratio, as a distance from 1; by default the algorithm's own."""
    reduction: Literal["token_mean", "sequence_mean", "step_mean", "sequence_sum"] | None = None
    """How token losses become one loss; by default the algorithm's own."""
    advantage: Literal["standardised", "centred", "leave_one_out", "maxrl", "gdpo"] | None = None
    """How rewards become advantages, where the algorithm leaves the choice."""
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """Degrees of freedom taken from the group's standard deviation."""
    kl_estimator: KLEstimator | None = None
    """Estimator of the KL term in the loss; by default the algorithm's own."""
    kl_placement: Literal["loss", "reward"] | None = None
    """Where the KL term acts; by default the algorithm's own."""
    mask_truncated: bool = False
    """Keep truncated trajectories in the baseline but out of the loss."""
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    """Tokens before an episode's limit (its most turns * max_completion_len) over which a penalty grows from 0 to 1; by
    default there is none."""
    dynamic_sampling: bool | None = None
    """Drop groups whose rewards are all equal and draw others; by default the algorithm's own."""
    max_draws: Annotated[int, Field(ge=1)] | None = None
    """Draws of a step under dynamic sampling; by default 4. After them it trains on what there is."""
    max_skipped_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps in a row without an informative group, after which the run stops; by default 10."""
    correction: Literal["tis", "mis"] | None = None
    """Correct for a sampler that is not the policy: truncate the importance ratio, or drop what is out of a band."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """The ratio that is corrected by; by default the token's."""
    correction_cap: Annotated[float, Field(gt=0)] | None = None
    """tis: the largest ratio; by default 2."""
    correction_band: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None = None
    """mis: the ratios that are kept; by default 0.5 to 2."""
    dapo_dynamic_sampling: bool | None = None
    """dapo: the same as dynamic_sampling."""
    gspo_importance: Literal["sequence", "token"] | None = None
    """gspo: one ratio a sequence, or a sequence's ratio with token gradients."""
    drgrpo_normalize_rewards: bool | None = None
    """dr-grpo: divide by the group's standard deviation after all."""
    drgrpo_loss_reduction: Literal["sequence_max_tokens", "token_mean"] | None = None
    """dr-grpo: divide by a constant length, or by the batch's tokens."""
    drgrpo_max_tokens: Annotated[int, Field(ge=1)] | None = None
    """dr-grpo: the constant length; by default max_turns * max_completion_len."""
    gigpo_omega: Annotated[float, Field(ge=0)] | None = None
    """gigpo: weight of the step advantage."""
    gigpo_gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """gigpo: discount of the return to go."""
    gigpo_normalization: Literal["std", "center"] | None = None
    """gigpo: divide by the group's standard deviation, or not."""
    options: dict[str, Any] = {}
    """[algorithm.options]: any other option of the algorithm, by its name in `mlxrl.algo.algorithm_options`."""


def build_algorithm(config: TrainConfig, *, max_turns: int | None = None) -> Algorithm:
    """The algorithm that a config describes.

    Args:
        config: the run.
        max_turns: turns of an episode, where they are known; by default the config's, or else 1.

    Raises:
        ValueError: the name is unknown, or an option does not belong to the algorithm or is out of its range.
    """
    section = config.algorithm
    try:
        cls = algorithm_class(section.name)
    except ValueError as error:
        raise ValueError(f"algorithm.name: {error}") from None
    known = algorithm_options(section.name)
    options: dict[str, Any] = {}
    for field, (owner, option) in OWNED.items():
        value = getattr(section, field)
        if value is None:
            continue
        if algorithm_class(owner) is not cls:
            raise ValueError(f"algorithm.{field} = {value!r} belongs to {owner}, not to {cls.name}; leave it out")
        options[option] = value
    for field in SHARED:
        value = getattr(section, field)
        if value is None:
            continue
        if field not in known:
            raise ValueError(
                f"algorithm.{field} = {value!r} has no effect on {cls.name}, which has no {field}; leave it out"
            )
        if field in options:
            raise ValueError(
                f"algorithm.{field} = {value!r} is set under the algorithm's own name too; leave one of them out"
            )
        options[field] = value
    for option, value in section.options.items():
        if option in options or option in (*SHARED, "reward_beta"):
            raise ValueError(f"algorithm.options.{option} has a field of its own; set that one")
        options[option] = value
    if section.ddof is not None and section.advantage not in (None, "standardised", "gdpo"):
        raise ValueError(
            f"algorithm.ddof = {section.ddof} has no effect on advantage = {section.advantage!r}, which divides by no "
            "standard deviation; leave it out"
        )
    if config.update.updates_per_batch * config.update.minibatches > 1 and {"clip_low", "clip_high"} <= known.keys():
        for side in ("clip_low", "clip_high"):
            if known[side] is None:
                options.setdefault(side, REUSE_CLIP)
    if config.kl_beta and kl_in_reward(config):
        if "reward_beta" not in known:
            raise ValueError(f"algorithm.kl_placement = 'reward' is not for {cls.name}; set 'loss' or leave it out")
        options["reward_beta"] = config.kl_beta
    algorithm = make_algorithm(section.name, **options)
    if algorithm.reduction.name == "sequence_max_tokens" and algorithm.reduction.max_tokens is None:
        length = (max_turns or config.max_turns or 1) * config.max_completion_len
        algorithm = make_algorithm(section.name, **options, max_tokens=length)
    return algorithm


def build_correction(config: TrainConfig) -> Correction | None:
    """The correction for the sampler that a config describes.

    Raises:
        ValueError: an option of a correction is set that does not act.
    """
    section = config.algorithm
    options = {"level": section.correction_level, "cap": section.correction_cap, "band": section.correction_band}
    given = {name: value for name, value in options.items() if value is not None}
    needs = {"level": ("tis", "mis"), "cap": ("tis",), "band": ("mis",)}
    for name, value in given.items():
        if section.correction not in needs[name]:
            kinds = " or ".join(f"'{kind}'" for kind in needs[name])
            raise ValueError(
                f"algorithm.correction_{name} = {value!r} needs correction = {kinds}; set it or leave it out"
            )
    if section.correction_band is not None and not section.correction_band[0] < section.correction_band[1]:
        raise ValueError(f"algorithm.correction_band = {list(section.correction_band)} must go from low to high")
    return None if section.correction is None else Correction(section.correction, **given)


def _is_blind_to_singletons(algorithm: Algorithm) -> bool:
    """Whether two groups of one trajectory each, one rewarded and one not, get no advantage at all."""
    zeros = mx.zeros((2, 1))
    pair = AlgorithmBatch.single_turn(
        rewards=[0.0, 1.0],
        group_structure=[0, 1],
        action_mask=zeros + 1,
        old_logprobs=zeros,
        reference_logprobs=zeros,
    )
    return not algorithm.advantages(pair).any().item()


def kl_in_reward(config: TrainConfig) -> bool:
    """Whether the KL is charged inside the reward rather than added to the loss."""
    placement = config.algorithm.kl_placement or algorithm_class(config.algorithm.name).kl_placement
    return placement == "reward"


def check_algorithm(config: TrainConfig) -> None:
    """Refuse what the algorithm cannot do.

    Raises:
        ValueError: see `build_algorithm`; or the group is too small for the algorithm's baseline.
    """
    algorithm = build_algorithm(config)
    build_correction(config)
    for field in ("max_draws", "max_skipped_steps"):
        value = getattr(config.algorithm, field)
        if value is not None and not getattr(algorithm, "dynamic_sampling", True):
            raise ValueError(
                f"algorithm.{field} = {value} needs dynamic sampling, which {algorithm.name} does not do by itself; "
                "set dynamic_sampling = true"
            )
    if config.group_size < algorithm.minimum_group_size:
        raise ValueError(
            f"group_size = {config.group_size} is too small for {algorithm.name}, whose baseline needs "
            f"{algorithm.minimum_group_size}; raise it"
        )
    if config.group_size == 1 and _is_blind_to_singletons(algorithm):
        raise ValueError(
            f"group_size = 1 gives every advantage of {algorithm.name} the value 0: nothing is compared; raise it"
        )
    if config.algorithm.kl_placement and not config.kl_beta:
        raise ValueError(f"algorithm.kl_placement = {config.algorithm.kl_placement!r} needs kl_beta above 0; set it")
    if config.algorithm.kl_estimator and (not config.kl_beta or kl_in_reward(config)):
        raise ValueError(
            f"algorithm.kl_estimator = {config.algorithm.kl_estimator!r} acts on a KL in the loss only; "
            "set kl_beta above 0 and kl_placement = 'loss'"
        )
