"""Several turns on the embedded model: GiGPO, ECHO, and where they have nothing to learn from.

Writes results/multiturn.json and prints the tables that the README of mlxrl-cli quotes; `nox -s multiturn` runs it.
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
WINDOW = 10
HELD_OUT = 16  # tasks
EPISODES = 8  # of each held-out task


def main() -> None:
    """Train every seed in processes of its own, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "key_door": [key_door(seed, omega) for omega in (1.0, 0.0) for seed in seeds],
        "echo": [echo(seed) for seed in seeds],
        "recurring": [recurring(seed) for seed in seeds],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    for table in (key_door_table, echo_table, recurring_table):
        print(table(results), end="\n\n")


def key_door(seed: int, omega: float) -> dict[str, Any]:
    """GiGPO, or at omega = 0 GRPO of whole episodes: success on held-out starts, and mean returns over the steps."""
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
    """The example made for a larger model, on the embedded one: what its five steps earn, and what is in reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, steps = trained(folder, "qwen3_0_6b_gigpo_recurring", seed, "model_id=embedded")
        session = opened(folder)
    return {
        "seed": seed,
        "return": round(mean([row["reward"] for row in steps]), 3),
        "invalid": round(mean([row["invalid_action_rate"] for row in steps]), 3),
        "skipped": sum(row["skipped"] for row in steps),
        "likeliest_move": round(likeliest_move(session), 1),
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


def likeliest_move(session: Session) -> float:
    """Log-probability (nats) of the likeliest valid first action over all tasks to train on."""
    tokenizer = session.tokenizer
    found = []
    for task in session.curriculum.train:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": task.prompt}], add_generation_prompt=True)
        for room in task.prompt.rpartition(": ")[2].split(", "):
            action = tokenizer.encode(f"<action>{room}</action>", add_special_tokens=False)
            answer = [*action, tokenizer.eos_token_id]
            mask = [0] * len(prompt) + [1] * len(answer)
            found.append(float(np.array(score(session.model, [[*prompt, *answer]], [mask]).logprobs).sum()))
    return max(found)


def windows(values: Sequence[float]) -> list[float]:
    """Means of WINDOW values each."""
    return [round(mean(values[i : i + WINDOW]), 3) for i in range(0, len(values), WINDOW)]


def key_door_table(results: dict[str, Any]) -> str:
    """Success and returns, as the README shows them."""
    lines = [
        "| advantage | seed | held-out success before | after | greedy | turns | invalid actions | "
        "return in steps 1-10, 11-20, 21-30, 31-40 | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["key_door"]:
        lines.append(
            f"| {'GiGPO' if row['omega'] else 'episode only'} | {row['seed']} | {row['success_before']:.3f} | "
            f"{row['success_after']:.3f} | {row['success_greedy']:.3f} | "
            f"{row['turns_before']:.1f} to {row['turns_after']:.1f} | "
            f"{row['invalid_before']:.2f} to {row['invalid_after']:.2f} | "
            f"{', '.join(f'{value:.2f}' for value in row['returns'])} | {row['seconds']} |"
        )
    how = f"{HELD_OUT} held-out starts, {EPISODES} episodes each at temperature 1, and one greedy"
    return "\n".join([*lines, "", f"({results['date']}, {results['machine']}; {how}.)"])


def echo_table(results: dict[str, Any]) -> str:
    """What the observations cost, as the README shows it."""
    lines = [
        "| seed | NLL of observations before | after, without ECHO | with ECHO | return without ECHO | with ECHO |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["echo"]:
        without, echoed = row["without"], row["with"]
        lines.append(
            f"| {row['seed']} | {row['nll_before']:.2f} | {without['nll']:.2f} | {echoed['nll']:.2f} | "
            f"{without['return_first']:.2f} to {without['return_last']:.2f} | "
            f"{echoed['return_first']:.2f} to {echoed['return_last']:.2f} |"
        )
    how = f"nats per token, episodes of the untrained policy on {HELD_OUT} held-out lakes"
    return "\n".join([*lines, "", f"({results['date']}, {results['machine']}; {how}.)"])


def recurring_table(results: dict[str, Any]) -> str:
    """What is out of reach, as the README shows it."""
    lines = [
        "| seed | return | invalid actions | steps without a gradient | likeliest valid move |",
        "|---|---|---|---|---|",
    ]
    for row in results["recurring"]:
        lines.append(
            f"| {row['seed']} | {row['return']:.2f} | {row['invalid']:.0%} | {row['skipped']:.0f} of 5 | "
            f"e^{row['likeliest_move']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
