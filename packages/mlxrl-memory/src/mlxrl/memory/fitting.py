"""Whether a run fits a budget, and the smallest changes that make it fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxrl.memory.constants import MIN_COMPLETION_LEN, MIN_GROUP_SIZE
from mlxrl.memory.estimation import estimate
from mlxrl.memory.machine import human_bytes
from mlxrl.memory.model import ModelShape
from mlxrl.memory.run import RunShape

Value = int | bool | None


@dataclass(frozen=True)
class Proposal:
    """Set `field` from `old` to `new`; `peak` is predicted with this change and all those before it."""

    field: str
    old: Value
    new: Value
    peak: int


@dataclass(frozen=True)
class FitResult:
    """The answer of `fit`.

    Attributes:
        fits: whether the run as asked fits.
        peak: its predicted bytes.
        budget: bytes that were allowed.
        proposals: changes in the order to try them; together they lead to `run`, or to the smallest run.
        run: the first shape that fits (the one asked, when it does); None when none does.
        smallest_peak: predicted bytes of the last shape tried.
        reason: one sentence for people.
    """

    fits: bool
    peak: int
    budget: int
    proposals: tuple[Proposal, ...]
    run: RunShape | None
    smallest_peak: int
    reason: str


def fit(model: ModelShape, run: RunShape, budget_bytes: int) -> FitResult:
    """Looks for the first shape that fits, changing as little of the learning problem as it can.

    The knobs, in order: gradient checkpointing on; fewer tokens per micro-batch; no merged copy; a budget for the
    caches; a narrower rollout (these five leave the gradient as it is); a smaller group; shorter completions. The first
    knob that lowers the peak is turned by one step (halved), until the run fits.

    Args:
        model: the model's shape.
        run: the run as asked.
        budget_bytes: bytes the run may take, such as `available_memory()`.

    Raises:
        ValueError: when the budget is not a positive whole number.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"budget_bytes must be a whole number above 0, got {budget_bytes!r}; pass the bytes to stay under."
        )
    wanted = estimate(model, run)
    asked = peak = wanted.peak
    shape = run
    while peak > budget_bytes:
        turned = (
            (step, estimate(model, step).peak) for knob in _KNOBS.values() if (step := knob(model, shape)) is not None
        )
        lower = next(((step, lowered) for step, lowered in turned if lowered < peak), None)
        if lower is None:
            break
        shape, peak = lower
    fits = peak <= budget_bytes
    return FitResult(
        fits=asked <= budget_bytes,
        peak=asked,
        budget=budget_bytes,
        proposals=_proposals(model, run, shape),
        run=shape if fits else None,
        smallest_peak=peak,
        reason=_reason(asked, peak, budget_bytes, "at least " if wanted.extrapolated else ""),
    )


def _proposals(model: ModelShape, run: RunShape, target: RunShape) -> tuple[Proposal, ...]:
    """The fields in which the two shapes differ, applied one after another in the order of the knobs."""
    proposals: list[Proposal] = []
    for field in _KNOBS:
        old, new = getattr(run, field), getattr(target, field)
        if old != new:
            run = replace(run, **{field: new})
            proposals.append(Proposal(field, old, new, estimate(model, run).peak))
    return tuple(proposals)


def _reason(asked: int, reached: int, budget: int, least: str) -> str:
    wanted = f"the run needs {least}{human_bytes(asked)} and the budget is {human_bytes(budget)}"
    if asked <= budget:
        return f"It fits: {wanted}."
    if reached <= budget:
        return f"It does not fit as asked: {wanted}; with the proposals it needs {least}{human_bytes(reached)}."
    return (
        f"It does not fit: {wanted}, and the smallest shape still needs {least}{human_bytes(reached)};"
        " take a smaller or more strongly quantised model, a lower LoRA rank, or shorter prompts."
    )


def _checkpoint(model: ModelShape, run: RunShape) -> RunShape | None:
    return None if run.gradient_checkpointing else replace(run, gradient_checkpointing=True)


def _fewer_tokens(model: ModelShape, run: RunShape) -> RunShape | None:
    tokens = max(run.sequence_length, run.micro_batch_tokens // 2)
    return replace(run, max_tokens_per_micro_batch=tokens) if tokens < run.micro_batch_tokens else None


def _no_copy(model: ModelShape, run: RunShape) -> RunShape | None:
    return replace(run, has_merged_copy=False) if run.has_merged_copy else None


def _smaller_budget(model: ModelShape, run: RunShape) -> RunShape | None:
    """The largest power of two below what the caches may hold now, as long as a row fits."""
    row = model.cache_bytes(run.sequence_length)
    held = run.width * row if run.kv_budget_bytes is None else run.kv_budget_bytes
    budget = 1 << max(0, (held - 1).bit_length() - 1)
    return replace(run, kv_budget_bytes=budget) if row <= budget < held else None


def _narrower(model: ModelShape, run: RunShape) -> RunShape | None:
    return replace(run, rollout_width=run.width // 2) if run.width > 1 else None


def _smaller_group(model: ModelShape, run: RunShape) -> RunShape | None:
    size = max(MIN_GROUP_SIZE, run.group_size // 2)
    return replace(run, group_size=size) if size < run.group_size else None


def _shorter(model: ModelShape, run: RunShape) -> RunShape | None:
    length = max(MIN_COMPLETION_LEN, run.max_completion_len // 2)
    return replace(run, max_completion_len=length) if length < run.max_completion_len else None


_KNOBS: dict[str, Callable[[ModelShape, RunShape], RunShape | None]] = {
    "gradient_checkpointing": _checkpoint,
    "max_tokens_per_micro_batch": _fewer_tokens,
    "has_merged_copy": _no_copy,
    "kv_budget_bytes": _smaller_budget,
    "rollout_width": _narrower,
    "group_size": _smaller_group,
    "max_completion_len": _shorter,
}
