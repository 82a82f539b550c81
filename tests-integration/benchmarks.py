"""mlxrl's rollouts and updates beside others', written to results/bench.json; `nox -s bench` runs it.

Each race is one `mlxrl-cli bench`, in which all play the same work in turn. Prints the table that the README quotes.
On Linux, where MLX's wheel links reference BLAS, some are run again with OpenBLAS preloaded for all who take part.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "bench.json"
PEER = "inductive-mlxrl==0.2.4"
OPENBLAS = ", OpenBLAS"
RACES = {
    "64 rows of 256 tokens": ("rollout", "--ends", "never"),
    "64 rows that end early": ("rollout", "--ends", "early"),
    "16 episodes of 3 turns": ("multiturn",),
    "16 episodes of 3 turns" + OPENBLAS: ("multiturn",),
    "32 episodes of 3 turns": ("multiturn", "--tasks", "4"),
    "32 episodes of 3 turns" + OPENBLAS: ("multiturn", "--tasks", "4"),
    "64 episodes, weights merged": ("multiturn", "--tasks", "8", "--weights", "merged"),
    "update, vocabulary of 32,000": ("update", "--shape", "tiny-32k"),
}


def main() -> None:
    """Run every race, then write the results."""
    openblas = find_library("openblas") if platform.system() == "Linux" else None
    reports: dict[str, dict[str, Any]] = {}
    for name, command in RACES.items():
        if not name.endswith(OPENBLAS):
            reports[name] = race(command, {})
        elif openblas is None:
            print(f"left out, for there is no OpenBLAS to preload: {name}")
        else:
            reports[name] = race(command, {"LD_PRELOAD": openblas, "OPENBLAS_NUM_THREADS": "1"})
    machine = next(iter(reports.values()))["machine"]
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {machine['cores']} cores, {machine['device']}",
        "races": reports,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


def race(command: tuple[str, ...], variables: dict[str, str]) -> dict[str, Any]:
    """The report of one race, whose programs see these environment variables besides."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        program = str(Path(sys.executable).with_name("mlxrl-cli"))
        options = ("--rounds", "3", "--against", PEER, "--json", str(report))
        subprocess.run([program, "bench", *command, *options], check=True, env=os.environ | variables)
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
