"""Predicted beside measured memory, in results/memory.json by backend; `nox -s memory` measures this machine's.

With reports of another machine's `mlxrl-cli bench memory --json REPORT` as arguments, it takes those in instead. Prints
the table that DESIGN.md shows.
"""

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxrl.cli.bench.memory import predicted_peaks

RESULTS = Path(__file__).parent / "results" / "memory.json"


def main() -> None:
    """Measure, or read the reports of one other machine, and put it beside those of the other backends."""
    reports = [json.loads(Path(file).read_text()) for file in sys.argv[1:]] or [measured()]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[reports[0]["backend"]] = {
        "date": datetime.now(UTC).date().isoformat(),
        "mlx": reports[0]["versions"]["mlx"],
        "device": reports[0]["machine"]["device_name"],
        "shapes": [
            {key: row[key] for key in ("name", "config", "run", "measured")}
            for report in reports
            for row in report["shapes"]
        ],
    }
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(table(results))


def measured() -> dict[str, Any]:
    """The report of a run on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        program = str(Path(sys.executable).with_name("mlxrl-cli"))
        subprocess.run([program, "bench", "memory", "--json", str(report)], check=True)
        return json.loads(report.read_text())


def table(results: dict[str, Any]) -> str:
    """The results as DESIGN.md shows them; predictions are those of the memory model as it is now."""
    lines = ["| backend | shape | rollout MiB | update MiB | peak MiB | ratio |", "|---|---|---|---|---|---|"]
    for backend, report in results.items():
        for row in report["shapes"]:
            predicted = predicted_peaks(row["config"], row["run"])
            cells = [f"{predicted[x] / 2**20:,.0f} / {row['measured'][x] / 2**20:,.0f}" for x in predicted]
            ratio = predicted["peak"] / row["measured"]["peak"]
            lines.append(f"| {backend} | {row['name']} | {' | '.join(cells)} | {ratio:.2f} |")
    sources = "; ".join(f"{x}: {r['device']}, MLX {r['mlx']}, {r['date']}" for x, r in results.items())
    return "\n".join([*lines, "", f"(predicted / measured; {sources})"])


if __name__ == "__main__":
    main()
