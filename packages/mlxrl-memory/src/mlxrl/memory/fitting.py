"""Whether a run fits a budget, and the smallest changes that make it fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlxrl.memory.constants import ADVISED_BITS, MIN_COMPLETION_LEN, MIN_GROUP_SIZE
from mlxrl.memory.estimation import MemoryEstimate, estimate
from mlxrl.memory.machine import human_bytes
from mlxrl.memory.model import ModelShape
from mlxrl.memory.quantization import Quantization
from mlxrl.memory.run import RunShape

Value = int | bool | None
Lower = Callable[[ModelShape, RunShape], Sequence[int]]
Knobs = dict[str, Lower]
Refusal = Callable[[str, int], str | None]


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
        run: the shape that fits (the one asked, when it does); None when none does.
        smallest_peak: predicted bytes with all proposals.
        reason: one sentence for people.
    """

    fits: bool
    peak: int
    budget: int
    proposals: tuple[Proposal, ...]
    run: RunShape | None
    smallest_peak: int
    reason: str


def fit(
    model: ModelShape,
    run: RunShape,
    budget_bytes: int,
    refusal: Refusal = lambda field, value: None,
) -> FitResult:
    """Looks for the shape that fits, changing as little of the learning problem as it can.

    The knobs, in the order in which they are turned: gradient checkpointing on; fewer tokens per micro-batch; no merged
    copy; a budget for the caches; a narrower rollout (these five leave the gradient as it is); a smaller group; shorter
    completions. From the last to the first, each keeps the largest of its values (halved at each step) with which the
    run fits once all knobs before it are turned down. So each proposal is needed: the run does not fit without it.
    Where even all of them do not make it fit, they are those that lead to the smallest peak.

    Args:
        model: the model's shape.
        run: the run as asked.
        budget_bytes: bytes the run may take, such as `available_memory()`.
        refusal: why a field of the run may not have a lower value, None where it may; such a value is left out.

    Raises:
        ValueError: when the budget is not a positive whole number.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"budget_bytes must be a whole number above 0, got {budget_bytes!r}; pass the bytes to stay under."
        )
    knobs = {field: _accepted(field, lower, refusal) for field, lower in _KNOBS.items()}
    wanted = estimate(model, run)
    smallest_peak = estimate(model, _turned_down(model, run, knobs)).peak
    shape = _largest(model, run, knobs, max(budget_bytes, smallest_peak))
    refused = [(field, _KNOBS[field](model, shape)) for field in knobs if not knobs[field](model, shape)]
    held = [f" {field} stays, for {refusal(field, values[0])}." for field, values in refused if values]
    peak = estimate(model, shape).peak
    return FitResult(
        fits=wanted.peak <= budget_bytes,
        peak=wanted.peak,
        budget=budget_bytes,
        proposals=_proposals(model, run, shape),
        run=shape if peak <= budget_bytes else None,
        smallest_peak=peak,
        reason=_reason(model, shape, wanted, peak, budget_bytes, held),
    )


def _accepted(field: str, lower: Lower, refusal: Refusal) -> Lower:
    """The lower values of a knob without those that are refused."""
    return lambda model, run: [value for value in lower(model, run) if refusal(field, value) is None]


def _largest(model: ModelShape, run: RunShape, knobs: Knobs, most: int) -> RunShape:
    """The run with each knob at its largest value with which those before it can still bring the peak to `most`."""
    knobs = dict(knobs)
    while knobs:
        field, lower = knobs.popitem()
        values = (getattr(run, field), *lower(model, run))
        shapes = (replace(run, **{field: value}) for value in values)
        run = next(x for x in shapes if estimate(model, _turned_down(model, x, knobs)).peak <= most)
    return run


def _turned_down(model: ModelShape, run: RunShape, knobs: Knobs) -> RunShape:
    """The run with these knobs at their smallest values."""
    for field in reversed(knobs):  # what a row takes bounds the tokens and the caches
        if lower := knobs[field](model, run):
            run = replace(run, **{field: lower[-1]})
    return run


def _proposals(model: ModelShape, run: RunShape, target: RunShape) -> tuple[Proposal, ...]:
    """The fields in which the two shapes differ, applied one after another in the order of the knobs."""
    proposals: list[Proposal] = []
    for field in _KNOBS:
        old, new = getattr(run, field), getattr(target, field)
        if old != new:
            run = replace(run, **{field: new})
            proposals.append(Proposal(field, old, new, estimate(model, run).peak))
    return tuple(proposals)


def _reason(
    model: ModelShape, shape: RunShape, wanted: MemoryEstimate, reached: int, budget: int, held: Sequence[str]
) -> str:
    least = "at least " if wanted.extrapolated else ""
    needed = f"the run needs {least}{human_bytes(wanted.peak)} and the budget is {human_bytes(budget)}"
    if wanted.peak <= budget:
        return f"It fits: {needed}."
    if reached <= budget:
        return f"It does not fit as asked: {needed}; with the proposals it needs {least}{human_bytes(reached)}."
    packed = replace(model, quantization=Quantization(bits=ADVISED_BITS))
    smaller = f"smaller or {ADVISED_BITS}-bit" if estimate(packed, shape).peak < reached else "smaller"
    return (
        f"It does not fit: {needed}, and the smallest shape still needs {least}{human_bytes(reached)};"
        f" take a {smaller} model, a lower LoRA rank, or shorter prompts.{''.join(held)}"
    )


def _checkpoint(model: ModelShape, run: RunShape) -> list[bool]:
    return [] if run.gradient_checkpointing else [True]


def _fewer_tokens(model: ModelShape, run: RunShape) -> list[int]:
    return _halved(run.micro_batch_tokens, run.sequence_length)


def _no_copy(model: ModelShape, run: RunShape) -> list[bool]:
    return [False] if run.has_merged_copy else []


def _smaller_budgets(model: ModelShape, run: RunShape) -> list[int]:
    """The powers of two below what the caches may hold now, as long as a row fits."""
    row = model.cache_bytes(run.sequence_length)
    held = run.width * row if run.kv_budget_bytes is None else run.kv_budget_bytes
    return [2**power for power in reversed(range((held - 1).bit_length())) if 2**power >= row]


def _narrower(model: ModelShape, run: RunShape) -> list[int]:
    return _halved(run.width, 1)


def _smaller_groups(model: ModelShape, run: RunShape) -> list[int]:
    return _halved(run.group_size, MIN_GROUP_SIZE)


def _shorter(model: ModelShape, run: RunShape) -> list[int]:
    context = run.max_completion_len if run.max_context is None else run.max_context
    return _halved(min(run.max_completion_len, context), MIN_COMPLETION_LEN)


def _halved(value: int, least: int) -> list[int]:
    """The value halved again and again, down to the least; nothing where it is no more than that."""
    values: list[int] = []
    while value > least:
        value = max(least, value // 2)
        values.append(value)
    return values


_KNOBS: Knobs = {
    "gradient_checkpointing": _checkpoint,
    "max_tokens_per_micro_batch": _fewer_tokens,
    "has_merged_copy": _no_copy,
    "kv_budget_bytes": _smaller_budgets,
    "rollout_width": _narrower,
    "group_size": _smaller_groups,
    "max_completion_len": _shorter,
}
"""Per knob the values below the run's own, the largest first."""
