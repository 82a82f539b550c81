"""`plan`, and the preflight of `train`: the predicted memory as a table."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxrl.cli.configs import read_config
from mlxrl.memory import human_bytes
from mlxrl.train import ConfigError, Curriculum, Plan, TrainConfig, config_field, make_curriculum, make_plan

GB = 2**30
# What follows from shapes alone; activations rest on measurements, and the runtime is an allowance.
COUNTED = ("weights", "merged_copy", "adapters", "kv_cache", "gradients", "batch")
ACTIVATIONS = ("rollout_activations", "update_activations")


def run_plan(
    path: Path | None, options: Mapping[str, Any], settings: Sequence[str], available_memory_gb: float | None
) -> None:
    """Print the plan of a config; exit code 1 if the run does not fit as asked."""
    config = read_config(path, options, settings)
    plan = plan_of(config, make_curriculum(config), available_memory_gb)
    show_plan(Console(emoji=False), plan)
    if not plan.fit.fits:
        sys.exit(1)


def plan_of(config: TrainConfig, curriculum: Curriculum, available_memory_gb: float | None) -> Plan:
    """The memory plan of a config, with the turns its environment allows.

    Raises:
        ConfigError: the model's config.json cannot be had, or the budget is not above 0.
    """
    if available_memory_gb is not None and not 0 < available_memory_gb < 1e9:
        raise ConfigError(f"--available-memory-gb must be a number of GB above 0, got {available_memory_gb}.")
    budget = None if available_memory_gb is None else max(1, int(available_memory_gb * GB))
    return make_plan(config, max_turns=curriculum.max_turns, available_bytes=budget)


def show_plan(console: Console, plan: Plan) -> None:
    """The prediction by part, whether it fits, and what to change where it does not."""
    parts = plan.estimate
    table = Table(title="predicted device memory", title_justify="left", box=None, show_header=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name in COUNTED:
        table.add_row(name.replace("_", " "), human_bytes(getattr(parts, name)), "counted")
    for name in ACTIVATIONS:
        how = "extrapolated" if parts.extrapolated else f"measured on {plan.run.backend}"
        table.add_row(name.replace("_", " "), human_bytes(getattr(parts, name)), how)
    table.add_row("runtime", human_bytes(parts.runtime), "allowed for")
    least = "at least " if parts.extrapolated else ""
    table.add_row("peak", f"{least}{human_bytes(parts.peak)}", style="bold")
    console.print(table)
    console.print(
        "peak = weights + merged copy + adapters + runtime + the larger of rollout (cache, activations) and update "
        "(gradients, activations, batch)",
        style="dim",
    )
    for note in parts.extrapolated:
        console.print(f"note: {note} The run may take more and be out of memory.", style="dim", highlight=False)
    console.print(plan.fit.reason, highlight=False)
    for proposal, change in zip(plan.fit.proposals, changes_of(plan), strict=True):
        console.print(f"  set {change}: {human_bytes(proposal.peak)}", highlight=False)


def changes_of(plan: Plan) -> list[str]:
    """The proposals as settings, each with the value that it replaces."""
    changes: list[str] = []
    for proposal in plan.fit.proposals:
        field, old = config_field(proposal.field, proposal.old)
        _, new = config_field(proposal.field, proposal.new)
        changes.append(f"{field} = {str(new).lower()} (was {str(old).lower()})")
    return changes
