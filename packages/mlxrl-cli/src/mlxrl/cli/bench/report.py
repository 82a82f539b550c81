"""What a race is reported as: a table, and everything as JSON."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlxrl.cli.bench import ours
from mlxrl.cli.bench.models import BenchPolicy
from mlxrl.cli.bench.race import Outcome, Result, median_ratio


def report_of(
    command: str, settings: dict[str, Any], policy: BenchPolicy, outcome: Outcome, peer_version: str | None
) -> dict[str, Any]:
    """Everything that was set and measured, as JSON takes it.

    Seconds, bytes and tokens a second; `ratio` is how many times as fast mlxrl is as the contestant, and `forwards` is
    left out where they are not counted.
    """
    mine = outcome.results[ours.NAME]
    report = policy.report
    return {
        "command": command,
        "settings": settings,
        **surroundings(**({} if peer_version is None else {"inductive-mlxrl": peer_version})),
        "model": {
            "name": settings["model"] or settings["shape"] or "tiny",
            "type": report.model_type,
            "layers": report.num_layers,
            "parameters": report.total_parameters,
            "dtype": report.dtype,
            "quantization": report.quantization,
            "adapted_layers": report.adapted_layers,
        },
        "contestants": [
            {
                "name": name,
                "tokens_per_second": median(result.rate for result in results),
                "ratio": median_ratio(mine, results),
                "seconds": median(result.seconds for result in results),
                "tokens": median(result.tokens for result in results),
                **_forwards(*results),
                "peak_bytes": max(result.peak_bytes for result in results),
                "rounds": [
                    {"seconds": result.seconds, "tokens": result.tokens, **_forwards(result)} for result in results
                ],
            }
            for name, results in outcome.results.items()
        ],
        "failed": dict(outcome.failures),
    }


def _forwards(*results: Result) -> dict[str, float]:
    """The median of the forward passes, if they are counted."""
    counted = [result.forwards for result in results if result.forwards is not None]
    return {"forwards": median(counted)} if counted else {}


def surroundings(**others: str) -> dict[str, Any]:
    """Versions, those of other packages included, and the machine."""
    return {
        "versions": {"mlxrl": _own_version(), "mlx": version("mlx"), "mlx-lm": version("mlx-lm"), **others},
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "device": mx.default_device().type.name,
            **mx.device_info(),
        },
    }


def show(console: Console, report: dict[str, Any], title: str) -> None:
    """The contestants as a table, and who failed."""
    model = report["model"]
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{model['type']}, {model['layers']} layers, {model['dtype']}, quantization {model['quantization']}, "
        f"{model['adapted_layers']} adapters; mlx {report['versions']['mlx']} on {report['machine']['device']}",
        highlight=False,
        soft_wrap=True,
    )
    rounds = report["settings"]["rounds"]
    caption = f"medians of {rounds} rounds" if rounds > 1 else "one round"
    table = Table(box=None, padding=(0, 1), caption=caption, caption_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    passes = any("forwards" in row for row in report["contestants"])
    for column in ("tokens/s", "mlxrl is", "time s", "tokens", *(["forwards"] * passes), "peak MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["contestants"]:
        table.add_row(
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            "" if row["name"] == ours.NAME else f"{row['ratio']:.2f}x",
            f"{row['seconds']:.3f}",
            f"{row['tokens']:,.0f}",
            *([f"{row['forwards']:,.0f}" if "forwards" in row else ""] * passes),
            f"{row['peak_bytes'] / 2**20:,.1f}",
        )
    console.print(table, highlight=False)
    if "last_rollout" in report:
        console.print(_where_time_goes(report["last_rollout"]), highlight=False, soft_wrap=True)
    for name, reason in report["failed"].items():
        print(f"{name}: {reason}", file=sys.stderr)


def _where_time_goes(stats: dict[str, Any]) -> str:
    named = {
        "launching": stats["launch_seconds"],
        "waiting for the device": stats["device_seconds"],
        "waiting for environments": stats["environment_seconds"],
    }
    passes = stats["decode_forwards"] + stats["prefill_forwards"]
    parts = {**named, "host": stats["seconds"] - sum(named.values())}
    spelled = ", ".join(f"{name} {1000 * seconds / passes:.2f}" for name, seconds in parts.items())
    return f"{ours.NAME}'s last round, ms a pass: {1000 * stats['seconds'] / passes:.2f} ({spelled})"


def _own_version() -> str:
    try:
        return version("mlxrl-cli")
    except PackageNotFoundError:  # run from the sources
        return "unknown"
