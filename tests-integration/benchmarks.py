"""mlxrl's rollouts and updates beside others', written to results/bench.json; `nox -s bench` runs it.

Each race is one `mlxrl-cli bench`, in which all play the same work in turn. Prints the table that the README quotes.
"""

import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "bench.json"
PEER = "inductive-mlxrl==0.2.4"
RACES = {
    "64 rows of 256 tokens": ("rollout", "--ends", "never"),
    "64 rows that end early": ("rollout", "--ends", "early"),
    "16 episodes of 3 turns": ("multiturn",),
    "32 episodes of 3 turns": ("multiturn", "--tasks", "4"),
    "64 episodes, weights merged": ("multiturn", "--tasks", "8", "--weights", "merged"),
    "update, vocabulary of 32,000": ("update", "--shape", "tiny-32k"),
}


def main() -> None:
    """Run every race, then write the results."""
    reports = {name: race(command) for name, command in RACES.items()}
    machine = next(iter(reports.values()))["machine"]
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {machine['cores']} cores, {machine['device']}",
        "races": reports,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


def race(command: tuple[str, ...]) -> dict[str, Any]:
    """The report of one race."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        program = str(Path(sys.executable).with_name("mlxrl-cli"))
        options = ("--rounds", "3", "--against", PEER, "--json", str(report))
        subprocess.run([program, "bench", *command, *options], check=True)
        found = json.loads(report.read_text())
    del found["settings"]["json"]  # a path of one machine
    return found


def table(results: dict[str, Any]) -> str:
    """The results as the README shows them."""
    lines = ["| work | who | tokens/s | peak MiB | mlxrl is |", "|---|---|---|---|---|"]
    for name, report in results["races"].items():
        for row in report["contestants"]:
            ratio = "" if row["name"] == "mlxrl" else f"{row['ratio']:.1f} times as fast"
            figures = f"{row['tokens_per_second']:,.0f} | {row['peak_bytes'] / 2**20:,.0f}"
            lines.append(f"| {name} | {row['name']} | {figures} | {ratio} |")
    model = next(iter(results["races"].values()))["model"]
    sentence = f"{results['date']}, {results['machine']}; {model['layers']} random {model['dtype']} layers, LoRA 8"
    return "\n".join([*lines, "", f"({sentence}; medians of 3 rounds.)"])


if __name__ == "__main__":
    main()
