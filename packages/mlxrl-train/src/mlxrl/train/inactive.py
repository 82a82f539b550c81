"""Fields that a config sets and that cannot act in its run; they are allowed, and told."""

import re

import mlx.core as mx

from mlxrl.train.config import RolloutConfig, TrainConfig
from mlxrl.train.inputs import names_relative_code
from mlxrl.train.tasks import Curriculum


def inactive_fields(config: TrainConfig, curriculum: Curriculum, template: str | None = None) -> tuple[str, ...]:
    """One sentence for each field that is set and changes nothing, for this machine, environment or update.

    Args:
        config: the run.
        curriculum: what it learns.
        template: the model's chat template, empty where prompts are not rendered with one; None where it is no text.
    """
    algorithm, rollout, turns = config.algorithm, config.rollout, curriculum.max_turns
    defaults, sequential = RolloutConfig(), config.rollout_mode == "sequential"
    updates = config.update.updates_per_batch * config.update.minibatches
    once = "acts only when ratios leave 1; set update.updates_per_batch or update.minibatches above 1"
    one_turn = "has no effect in episodes of one turn"
    one_row = "has no effect when rollout_mode is 'sequential'"
    found = [
        (
            config.optimizer.warmup_steps >= config.steps,
            "optimizer.warmup_steps",
            f"= {config.optimizer.warmup_steps} lasts as long as the run of steps = {config.steps}, so that neither "
            "learning_rate nor schedule comes to act; lower it",
        ),
        (config.iogpu_wired_limit_mb and not mx.metal.is_available(), "iogpu_wired_limit_mb", "acts on Metal only"),
        (sequential and rollout.width != defaults.width, "rollout.width", one_row),
        (sequential and rollout.kv_budget_gb, "rollout.kv_budget_gb", one_row),
        (config.max_observation_len and turns == 1, "max_observation_len", one_turn),
        (rollout.context == "turn" and turns == 1, "rollout.context", one_turn),
        (not rollout.deterministic and turns == 1, "rollout.deterministic", one_turn),
        (
            rollout.env_timeout != defaults.env_timeout and curriculum.single_turn,
            "rollout.env_timeout",
            "has no effect on plain prompts, which are nothing to wait for",
        ),
        (
            config.reference != "base" and not config.kl_beta,
            "reference",
            "acts on a KL term only; set kl_beta above 0",
        ),
        (config.echo_alpha and turns == 1, "echo_alpha", one_turn),
        ((config.max_turns or 0) > 1 and curriculum.single_turn, "max_turns", "has no effect on plain prompts"),
        (
            (config.max_turns or 0) > curriculum.measured_turns and not curriculum.single_turn,
            "max_turns",
            f"is above the {curriculum.measured_turns} of the environments that were asked; where no other task has "
            "more turns, leave it out, for the memory plan and dr-grpo's constant go by it",
        ),
        (
            config.eval.tasks > len(curriculum.held_out),
            "eval.tasks",
            f"is above the {len(curriculum.held_out)} tasks that are held out",
        ),
        (algorithm.clip_low and updates == 1, "algorithm.clip_low", once),
        (algorithm.clip_high and updates == 1, "algorithm.clip_high", once),
        (
            config.code_folder and not names_relative_code(config),
            "code_folder",
            "is for files of env_name and [[rewards]] that are named by relative paths, of which there are none",
        ),
        (
            algorithm.gspo_importance == "token",
            "algorithm.gspo_importance",
            "has the gradient of 'sequence' while an advantage is the same along a trajectory, as gspo's are",
        ),
        (
            config.data and config.data.eval_path and not config.eval.tasks,
            "data.eval_path",
            "is read for evaluations only; set eval.tasks",
        ),
        (
            config.data and config.data.eval_split and not config.eval.tasks,
            "data.eval_split",
            "is read for evaluations only; set eval.tasks",
        ),
        (
            config.data and config.data.seed and not config.data.eval_fraction,
            "data.seed",
            "draws the share that is held out; set data.eval_fraction",
        ),
    ]
    if template is not None and "chat_template" not in config.chat_template_kwargs:  # which puts another in its place
        unnamed = f"is never mentioned by the chat template of model_id = {config.model_id!r}"
        found += [
            (not _mentions(template, name), f"chat_template_kwargs.{name}", unnamed)
            for name in config.chat_template_kwargs
        ]
    return tuple(f"{name} {why}." for inactive, name, why in found if inactive)


def _mentions(template: str, name: str) -> bool:
    names = (name, "thinking") if name == "enable_thinking" else (name,)  # which mlx-lm passes on as either
    return re.search(rf"\b({'|'.join(map(re.escape, names))})\b", template) is not None
