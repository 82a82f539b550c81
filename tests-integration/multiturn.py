"""Several turns on the embedded model: GiGPO beside GRPO of whole episodes, ECHO, and a world whose states recur.

Writes results/multiturn.json and prints the tables that the README of mlxrl-cli quotes; `nox -s multiturn` runs it, and
`nox -s multiturn -- --only recurring` one part.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxrl.cli.configs import example_text, read_config
from mlxrl.policy import load_adapter, score
from mlxrl.rollout import Role, Trajectory, group_requests
from mlxrl.train import Session, open_session
from mlxrl.train.metrics import mean, rollout_metrics

RESULTS = Path(__file__).parent / "results" / "multiturn.json"
SEEDS = {"key_door": range(5), "echo": range(3), "recurring": range(3)}
WINDOW = 5  # steps
HELD_OUT = 16  # tasks
EPISODES = 8  # of each held-out task


def main() -> None:
    """Train every seed in processes of its own, then write the results; those of other parts stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of each part's own")
    arguments = parser.parse_args()
    for name in arguments.only:
        seeds = arguments.seeds or SEEDS[name]
        if name == "key_door":
            runs = [key_door(seed, omega) for omega in (1.0, 0.0) for seed in seeds]
        else:
            runs = [{"echo": echo, "recurring": recurring}[name](seed) for seed in seeds]
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        part = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "runs": runs}
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**results, name: part}, indent=2) + "\n")
        for table in TABLES[name]:
            print(table(part), end="\n\n", flush=True)


def key_door(seed: int, omega: float) -> dict[str, Any]:
    """GiGPO, or at omega = 0 GRPO of whole episodes: success on held-out starts, and mean returns over the steps.

    Either way the run samples the same number of episodes, from the same starts in the same order.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, steps = trained(folder, "key_door", seed, f"algorithm.gigpo_omega={omega}")
        session = opened(folder)
        before = rollout_metrics(held_out_episodes(session, temperature=1.0), session.rewards)
        load_adapter(session.model, folder / "run" / "adapters")
        after = rollout_metrics(held_out_episodes(session, temperature=1.0), session.rewards)
        greedy = rollout_metrics(held_out_episodes(session, temperature=0.0), session.rewards)
    return {
        "seed": seed,
        "omega": omega,
        "success_before": round(before["success_rate"], 3),
        "success_after": round(after["success_rate"], 3),
        "success_greedy": round(greedy["success_rate"], 3),
        "turns_before": round(before["num_turns"], 1),
        "turns_after": round(after["num_turns"], 1),
        "invalid_before": round(before["invalid_action_rate"], 3),
        "invalid_after": round(after["invalid_action_rate"], 3),
        "returns": windows([row["reward"] for row in steps]),
        "seconds": round(seconds),
    }


def echo(seed: int) -> dict[str, Any]:
    """Nats per token that the observations of held-out episodes of the base policy cost the base and two runs."""
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, settings in (("with", []), ("without", ["echo_alpha=0.0"])):
            _, steps = trained(folder / run, "frozen_lake_echo", seed, *settings)
            runs[run] = {"return_first": round(steps[0]["reward"], 3), "return_last": round(steps[-1]["reward"], 3)}
        session = opened(folder / "with")
        episodes = held_out_episodes(session, temperature=1.0)
        before = observation_nll(session.model, episodes)
        for run, outcome in runs.items():
            load_adapter(session.model, folder / run / "run" / "adapters")
            outcome["nll"] = round(observation_nll(session.model, episodes), 3)
    return {"seed": seed, "nll_before": round(before, 3), **runs}


def recurring(seed: int) -> dict[str, Any]:
    """GiGPO over whole transcripts in a world whose states recur: returns and invalid actions over the steps."""
    with tempfile.TemporaryDirectory() as name:
        seconds, steps = trained(Path(name), "recurring_text", seed)
    return {
        "seed": seed,
        "returns": windows([row["reward"] for row in steps]),
        "invalid": windows([row["invalid_action_rate"] for row in steps]),
        "anchor_share": round(mean([row["anchor_share"] for row in steps]), 3),
        "seconds": round(seconds),
    }


def trained(folder: Path, example: str, seed: int, *settings: str) -> tuple[float, list[dict[str, Any]]]:
    """Train an example from the command line into folder/run; seconds of the command and the metrics of the steps."""
    folder.mkdir(exist_ok=True)
    (folder / "example.toml").write_text(example_text(example))
    program = str(Path(sys.executable).with_name("mlxrl-cli"))
    command = [program, "train", "--config", "example.toml", "--seed", str(seed), "--output", "run"]
    start = time.perf_counter()
    subprocess.run([*command, *(word for setting in settings for word in ("--set", setting))], check=True, cwd=folder)
    seconds = time.perf_counter() - start
    return seconds, [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def opened(folder: Path) -> Session:
    """The live objects of the run in folder/run, before its first step."""
    return open_session(read_config(folder / "run" / "config.toml", {"eval.tasks": HELD_OUT}, ()))


def held_out_episodes(session: Session, *, temperature: float) -> list[Trajectory]:
    """Episodes of the held-out tasks, scored by the environment: at temperature 0 one of each, else several."""
    requests = group_requests(
        session.curriculum.held_out,
        session.curriculum.suite.make,
        group_size=EPISODES if temperature else 1,
        seed=12345,
        sampling=replace(session.engine.sampling, temperature=temperature),
    )
    return session.engine.rollout(requests)


def observation_nll(model: nn.Module, episodes: Sequence[Trajectory]) -> float:
    """Mean negative log-probability of the episodes' observation tokens, nats per token."""
    total, count = 0.0, 0
    for segment in (segment for episode in episodes for segment in episode.segments):
        observed = segment.roles == Role.ECHO
        if observed.any():
            total -= float(np.array(score(model, segment.token_ids[None], observed[None]).logprobs).sum())
            count += int(observed.sum())
    return total / count


def windows(values: Sequence[float]) -> list[float]:
    """Means of WINDOW values each."""
    return [round(mean(values[i : i + WINDOW]), 3) for i in range(0, len(values), WINDOW)]


def key_door_table(part: dict[str, Any]) -> str:
    """Success of each run, as the README shows it."""
    lines = [
        "| advantage | seed | held-out success before | after | greedy | turns | invalid actions | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in part["runs"]:
        lines.append(
            f"| {'GiGPO' if row['omega'] else 'episode only'} | {row['seed']} | {row['success_before']:.3f} | "
            f"{row['success_after']:.3f} | {row['success_greedy']:.3f} | "
            f"{row['turns_before']:.1f} to {row['turns_after']:.1f} | "
            f"{row['invalid_before']:.2f} to {row['invalid_after']:.2f} | {row['seconds']} |"
        )
    how = f"{HELD_OUT} held-out starts, {EPISODES} episodes each at temperature 1, and one greedy"
    return "\n".join([*lines, "", measured(part, how)])


def curves_table(part: dict[str, Any]) -> str:
    """Mean return over the seeds as training goes on, with and without the step advantage, as the README shows it."""
    curves = {omega: [row["returns"] for row in part["runs"] if row["omega"] == omega] for omega in (1.0, 0.0)}
    lines = ["| steps | GiGPO | episode only |", "|---|---|---|"]
    for index in range(len(curves[1.0][0])):
        found = [[returns[index] for returns in curve] for curve in curves.values()]
        cells = [f"{mean(values):z.2f} ({min(values):z.2f} to {max(values):z.2f})" for values in found]
        lines.append(f"| {index * WINDOW + 1}-{(index + 1) * WINDOW} | {' | '.join(cells)} |")
    how = f"mean return of {WINDOW} steps, mean of {len(curves[1.0])} seeds (least to greatest)"
    return "\n".join([*lines, "", measured(part, how)])


def echo_table(part: dict[str, Any]) -> str:
    """What the observations cost, as the README shows it."""
    lines = [
        "| seed | NLL of observations before | after, without ECHO | with ECHO | return without ECHO | with ECHO |",
        "|---|---|---|---|---|---|",
    ]
    for row in part["runs"]:
        without, echoed = row["without"], row["with"]
        lines.append(
            f"| {row['seed']} | {row['nll_before']:.2f} | {without['nll']:.2f} | {echoed['nll']:.2f} | "
            f"{without['return_first']:.2f} to {without['return_last']:.2f} | "
            f"{echoed['return_first']:.2f} to {echoed['return_last']:.2f} |"
        )
    how = f"nats per token, episodes of the untrained policy on {HELD_OUT} held-out lakes"
    return "\n".join([*lines, "", measured(part, how)])


def recurring_table(part: dict[str, Any]) -> str:
    """Returns over the steps, as the README shows them."""
    lines = [
        "| seed | return in the first 10 steps | last 10 | invalid actions | turns with company | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in part["runs"]:
        (first, last), (invalid_first, invalid_last) = map(first_and_last_10, (row["returns"], row["invalid"]))
        lines.append(
            f"| {row['seed']} | {first:.2f} | {last:.2f} | {invalid_first:.2f} to {invalid_last:.2f} | "
            f"{row['anchor_share']:.0%} | {row['seconds']} |"
        )
    how = "company: another turn of the group was played in the same state"
    return "\n".join([*lines, "", measured(part, how)])


def first_and_last_10(means: Sequence[float]) -> tuple[float, float]:
    """Of means of WINDOW steps each: the means of the first and of the last ten steps."""
    return mean(means[: 10 // WINDOW]), mean(means[-(10 // WINDOW) :])


def measured(part: dict[str, Any], how: str) -> str:
    """When and where a part was measured, and how."""
    return f"({part['date']}, {part['machine']}; {how}.)"


TABLES = {
    "key_door": (key_door_table, curves_table),
    "echo": (echo_table,),
    "recurring": (recurring_table,),
}


if __name__ == "__main__":
    main()
