"""inductive-mlxrl, in an environment and a process of its own."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from mlxrl.cli.bench.models import LORA_SCALE, BenchPolicy
from mlxrl.cli.bench.race import ContestantError, Result
from mlxrl.cli.bench.work import MultiturnWork, RolloutWork, UpdateWork
from mlxrl.train import ConfigError

PACKAGE = "inductive-mlxrl"
PATHS = {"rollout": ["train", "batched", "compiled", "serial"], "multiturn": ["train"], "update": ["train"]}
"""Per command, what the child can do; `peer_child` says which functions these are."""
CHILD = Path(__file__).with_name("peer_child.py")


def check_requirement(requirement: str) -> str:
    """`--against`, if it names a package that the bench knows.

    Raises:
        ConfigError: it does not.
    """
    if re.fullmatch(PACKAGE + r"(==[\w.]+)?", requirement) is None:
        raise ConfigError(f"--against must be {PACKAGE} or {PACKAGE}==VERSION, got {requirement!r}.")
    return requirement


def contestant_name(path: str) -> str:
    """The name of one of the peer's paths in tables."""
    return f"{PACKAGE}:{path}"


def install(requirement: str, folder: Path) -> Path:
    """Install the package alone, with uv or else with pip, next to nothing else of this environment.

    MLX and mlx-lm are not installed with it: the child takes this environment's, so that all run on the same build.

    Args:
        requirement: what the installer is asked for.
        folder: empty; takes what is installed.

    Returns:
        The folder to put on the child's path.

    Raises:
        ContestantError: there is no installer, or it failed.
    """
    site, uv, python = folder / "site", shutil.which("uv"), sys.executable
    if uv is not None:
        install = [uv, "pip", "install", "--python", python]
    else:
        if importlib.util.find_spec("pip") is None:
            _command([python, "-m", "venv", str(folder / "venv")])
            python = str(folder / "venv" / "bin" / "python")
        install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    _command([*install, "--quiet", "--no-deps", "--target", str(site), requirement])
    return site


def _command(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise ContestantError(f"cannot be installed: {' '.join(words)} failed: {said[-1]}")


class PeerProcess:
    """The child: it loads the model once, and does the work each time it is asked.

    Args:
        site: what `install` returned.
        errors: file for what the child says besides its answers.
        setup: model, work and adapter, see `peer_child`.

    Raises:
        ContestantError: it cannot be started.
    """

    def __init__(self, site: Path, errors: Path, setup: Mapping[str, Any]):
        self._errors = errors
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        with errors.open("w") as said:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],  # -P: the modules beside the script are none of its business
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.version: str = self.ask(setup)["version"]

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, get a line.

        Raises:
            ContestantError: the child has ended.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            print(json.dumps(message), file=self._child.stdin, flush=True)
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = self._errors.read_text().strip().splitlines() or ["it said nothing"]
            raise ContestantError(f"its process ended with exit code {self._child.wait()}: {said[-1]}")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._child.kill()
        self._child.communicate()


@dataclass(frozen=True)
class PeerContestant:
    """One of the peer's paths."""

    process: PeerProcess
    path: str

    @property
    def name(self) -> str:
        """The name in tables."""
        return contestant_name(self.path)

    def run(self) -> Result:
        """Let the child do the work; it times itself."""
        answer = self.process.ask({"path": self.path})
        if "error" in answer:
            raise ContestantError(answer["error"])
        return Result(answer["tokens"], answer["seconds"], None, answer["peak_bytes"])


def peer_setup(
    command: str, policy: BenchPolicy, work: RolloutWork | MultiturnWork | UpdateWork, rank: int, seed: int
) -> dict[str, Any]:
    """What the child needs to know."""
    return {
        "command": command,
        "model": str(policy.folder),
        "rank": rank,
        "scale": LORA_SCALE,
        "seed": seed,
        "ends": sorted(policy.tokenizer.eos_token_ids),
        "work": asdict(work),
    }
