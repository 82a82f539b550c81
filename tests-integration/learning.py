"""Many seeds of the embedded default, written to results/learning.json; `nox -s learning` runs it.

Prints the table that the README quotes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "learning.json"
WINDOW = 5


def main() -> None:
    """Train each seed in a process of its own, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    runs = [run(seed) for seed in arguments.seeds]
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "runs": runs,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


def run(seed: int) -> dict[str, Any]:
    """What one seed came to: mean rewards of the first and last steps, held-out accuracies, seconds of the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("mlxrl-cli")),
            "train",
            "--seed",
            str(seed),
            "--output",
            f"{folder}/run",
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, cwd=folder)
        seconds = time.perf_counter() - start
        metrics = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        evaluations = [json.loads(line) for line in Path(folder, "run", "evaluations.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in metrics]
    return {
        "seed": seed,
        "reward_first": round(sum(rewards[:WINDOW]) / WINDOW, 3),
        "reward_last": round(sum(rewards[-WINDOW:]) / WINDOW, 3),
        "accuracy_before": evaluations[0]["accuracy"],
        "accuracy_after": evaluations[-1]["accuracy"],
        "length_first": round(metrics[0]["completions/mean_length"], 1),
        "length_last": round(metrics[-1]["completions/mean_length"], 1),
        "seconds": round(seconds),
    }


def table(results: dict[str, Any]) -> str:
    """The results as the README shows them."""
    lines = [
        "| seed | reward, first 5 steps | last 5 | held-out accuracy before | after | tokens an answer | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["runs"]:
        lines.append(
            f"| {row['seed']} | {row['reward_first']:.3f} | {row['reward_last']:.3f} | {row['accuracy_before']:.3f} | "
            f"{row['accuracy_after']:.3f} | {row['length_first']:.0f} to {row['length_last']:.0f} | {row['seconds']} |"
        )
    return "\n".join([*lines, "", f"({results['date']}, {results['machine']}; greedy, 200 held-out sums.)"])


if __name__ == "__main__":
    main()
