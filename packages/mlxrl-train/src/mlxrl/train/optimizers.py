"""[optimizer]: from config fields to an optimizer of mlx.optimizers, and the learning rate of every step."""

import math
from typing import Annotated, Any, Literal, Self

import mlx.core as mx
import mlx.optimizers as optim
from pydantic import Field, model_validator

from mlxrl.train.sections import Section

Beta = Annotated[float, Field(ge=0, lt=1)]

# What each optimizer can be told besides learning rate and weight decay, and what it is told by default.
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True},
    "adafactor": {},
    "lion": {"betas": (0.9, 0.99)},
    "muon": {"momentum": 0.95},
}


class OptimizerConfig(Section):
    """[optimizer]: how gradients become steps."""

    name: Literal["adam", "adamw", "adafactor", "lion", "muon"] = "adamw"
    """Optimizer, by its name in mlx.optimizers."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """Learning rate after warm-up; LoRA takes about ten times that of full training. Lion takes a third to a tenth of
    adam's, muon several times it."""
    betas: tuple[Beta, Beta] | None = None
    """adam, adamw: decay of the two moments, by default 0.9 and 0.999; lion: of its direction and of its moment, by
    default 0.9 and 0.99."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """adam, adamw: added to the square root of the second moment; by default 1e-8."""
    momentum: Beta | None = None
    """muon: decay of the moment; by default 0.95."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay: adamw, adafactor and lion take it off the weights, muon adds it to the gradient."""
    bias_correction: bool | None = None
    """adam, adamw: correct the moments' start at zero, by default true; without it the first steps are several times
    too large or too small."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, down to end_learning_rate at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its value."""
    end_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of the last step under the linear and cosine schedules."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        """Put in the optimizer's own defaults, so that a run's folder tells them."""
        if not isinstance(values, dict):
            return values
        name = values.get("name", cls.model_fields["name"].default)
        return OPTIONS.get(str(name), {}) | values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for option in ("betas", "eps", "momentum", "bias_correction"):
            value = getattr(self, option)
            owners = [name for name, options in OPTIONS.items() if option in options]
            if value is not None and self.name not in owners:
                raise ValueError(
                    f"{option} = {list(value) if isinstance(value, tuple) else value} has no effect on {self.name}; "
                    f"leave it out, or set name = {' or '.join(map(repr, owners))}"
                )
        if self.weight_decay and self.name == "adam":
            raise ValueError(f"weight_decay = {self.weight_decay} has no effect on adam; set name = 'adamw'")
        if self.end_learning_rate and self.schedule == "constant":
            raise ValueError(
                f"end_learning_rate = {self.end_learning_rate} has no effect on a constant schedule; "
                "set schedule = 'linear' or 'cosine'"
            )
        if self.end_learning_rate > self.learning_rate:
            raise ValueError(
                f"end_learning_rate = {self.end_learning_rate} is above learning_rate = {self.learning_rate}, and a "
                "schedule falls; lower it"
            )
        return self


class Muon(optim.Muon):
    """Muon on the arrays of an adapter: every matrix by itself, in the layout `[outputs, inputs]` that it is made for.

    `mlx.optimizers.Muon` makes one matrix of all experts' factors, takes a linear layer's factors, `[inputs, outputs]`,
    the wrong way round, and leaves vectors to plain momentum; here a vector is a matrix of one column.
    """

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One step of one array; `state["v"]` moves on."""

        def step(gradient_O_I: mx.array, parameter_O_I: mx.array, v_O_I: mx.array) -> tuple[mx.array, mx.array]:
            own = {"v": v_O_I}
            return super(Muon, self).apply_single(gradient_O_I, parameter_O_I, own), own["v"]

        stepped = mx.vmap(step)(*map(_as_matrices, (gradient, parameter, state["v"])))
        parameter, state["v"] = (_from_matrices(values_E_O_I, parameter.ndim) for values_E_O_I in stepped)
        return parameter


def _as_matrices(array: mx.array) -> mx.array:
    """`[experts, outputs, inputs]` of a factor of experts, `[inputs, outputs]` of a linear layer, or a vector."""
    if array.ndim == 3:
        return array
    return mx.contiguous(array.T[None] if array.ndim == 2 else array[None, :, None])


def _from_matrices(values_E_O_I: mx.array, ndim: int) -> mx.array:
    if ndim == 3:
        return values_E_O_I
    return mx.contiguous(values_E_O_I[0].T if ndim == 2 else values_E_O_I[0, :, 0])


CLASSES: dict[str, type[Any]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adafactor": optim.Adafactor,
    "lion": optim.Lion,
    "muon": Muon,
}


# Values that each keeps per element of the adapter; adafactor's rows and columns are fewer, and counted as one.
STATES = {"adam": 2, "adamw": 2, "adafactor": 1, "lion": 1, "muon": 1}


def make_optimizer(config: OptimizerConfig) -> optim.Optimizer:
    """The optimizer of a config, its learning rate at the value after warm-up."""
    options = {option: getattr(config, option) for option in OPTIONS[config.name]}
    if config.name != "adam":
        options["weight_decay"] = config.weight_decay
    if config.name == "adafactor":
        # steps of the learning rate itself: relative to its own size, a factor that starts at 0 would hardly leave it
        options |= {"relative_step": False, "scale_parameter": False}
    return CLASSES[config.name](config.learning_rate, **options)


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
