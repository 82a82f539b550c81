"""Optimizers and learning rates by their config."""

import math

import mlx.optimizers as optim

from mlxrl.train.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optim.Optimizer:
    """The optimizer of a config, its learning rate at the value after warm-up."""
    options = {"betas": list(config.betas), "eps": config.eps, "bias_correction": config.bias_correction}
    if config.name == "adam":
        return optim.Adam(config.learning_rate, **options)
    return optim.AdamW(config.learning_rate, weight_decay=config.weight_decay, **options)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of one step.

    It rises linearly over `warmup_steps` to `learning_rate`, which the first step after warm-up has; from there it
    falls, linearly or along half a cosine, to `end_learning_rate` at the last step, or stays.

    Args:
        config: the schedule.
        step: from 0.
        steps: steps of the run.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.end_learning_rate + (config.learning_rate - config.end_learning_rate) * left
