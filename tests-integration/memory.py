"""Predicted beside measured memory, in results/memory.json by backend; `nox -s memory` measures this machine's.

With the report of another machine's `mlxrl-cli bench memory --json REPORT` as argument, it takes that in instead.
Prints the table that DESIGN.md shows.
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
    """Measure, or read a report, and put it beside those of the other backends."""
    report = json.loads(Path(sys.argv[1]).read_text()) if sys.argv[1:] else measured()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = {
        "date": datetime.now(UTC).date().isoformat(),
        "mlx": report["versions"]["mlx"],
        "device": report["machine"]["device_name"],
        "shapes": [{key: row[key] for key in ("name", "config", "run", "measured")} for row in report["shapes"]],
    }
    results[report["backend"]] = kept
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
