"""Whether the memory that steps take is what was planned, and how near it is to what there is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlxrl.memory import human_bytes
from mlxrl.train.config import TrainConfig
from mlxrl.train.errors import ConfigError
from mlxrl.train.plan import Plan, make_plan
from mlxrl.train.run_folder import RunState

# The share of the memory at which a run is warned: the next step's rows may be longer.
NEAR_LIMIT = 0.9
# Times what was planned at which it is warned already at half of the memory: what the plan says of longer rows is off.
BEYOND_PLAN = 1.15
# Times what was planned that MLX may hold before it waits for the device, where half of the memory is less than that.
LAUNCHING_AHEAD = 1.1


def plan_to_watch(config: TrainConfig, *, max_turns: int, available_bytes: int | None) -> Plan | None:
    """The plan of a run, None for a model that cannot be planned."""
    try:
        return make_plan(config, max_turns=max_turns, available_bytes=available_bytes)
    except ConfigError:
        return None


@contextmanager
def planned_memory(plan: Plan | None) -> Iterator[None]:
    """Within the context MLX launches no further ahead than the planned memory, or half of what there is, goes.

    A GPU's host launches faster than the device computes, and each launch holds its arrays until it has run: an update
    that needs 10 GB then takes 26. With a limit MLX waits for the device instead, and takes more only where it must.

    Args:
        plan: the run's plan, where there is one.
    """
    if plan is None:
        yield
        return
    planned, budget = LAUNCHING_AHEAD * plan.estimate.mlx_peak, plan.fit.budget
    before = mx.set_memory_limit(int(max(min(planned, budget), budget / 2)))
    try:
        yield
    finally:
        mx.set_memory_limit(before)


def watch_memory(state: RunState, what: str, peak_bytes: int, plan: Plan | None) -> list[dict[str, Any]]:
    """A line for events.jsonl, once a run, when it came near the memory there is or took more than was planned.

    Args:
        state: where the run stands; remembers that it was said.
        what: what was done, a step or an evaluation.
        peak_bytes: MLX's peak in it.
        plan: the run's plan, where there is one.
    """
    if plan is None or state.memory_warned:
        return []
    limit, planned = plan.fit.budget, plan.estimate.peak
    peak = peak_bytes + plan.estimate.runtime
    took = f"{what} took {human_bytes(peak)} of the {human_bytes(limit)} that there are"
    advice = "update.max_tokens_per_micro_batch and rollout.width bound it"
    if peak > NEAR_LIMIT * limit:
        reason = f"{took}; {advice}"
    elif peak > max(BEYOND_PLAN * planned, limit / 2):
        reason = f"{took}, and {human_bytes(planned)} were planned: longer rows may not fit; {advice}"
    else:
        return []
    state.memory_warned = True
    return [{"step": state.step, "event": "memory", "reason": reason, "peak": peak, "planned": planned, "limit": limit}]
