"""A run on disk: its config, what happened in every step, and checkpoints to go on from."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlxrl.policy import LoRAConfig, ModelError, PolicyReport, load_adapter, save_adapter
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import config_toml
from mlxrl.train.errors import RunError
from mlxrl.train.files import append_lines, point_link, read_lines, write_folder, write_text

STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
# Fields that may change between a run and its continuation, for they change nothing of what the steps compute.
FREE_ON_RESUME = {"steps", "output", "eval", "checkpoint"}


@dataclass
class RunState:
    """Where a run stands; with the adapter and the optimizer's state, all that the next step depends on.

    Args:
        step: steps taken.
        position: tasks drawn.
        passed_over: tasks drawn that did not fit.
        skipped_in_a_row: steps without an update since the last with one.
    """

    step: int = 0
    position: int = 0
    passed_over: int = 0
    skipped_in_a_row: int = 0


class RunFolder:
    """The folder of one run; see `open_run`."""

    def __init__(self, path: Path, batch_file: Path | None = None):
        self.path, self.batch_file = path, batch_file
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.adapters = path / "adapters"

    def log(self, file: Path, *rows: dict[str, Any]) -> None:
        """Append rows to one of the folder's files of lines."""
        append_lines(file, rows)

    def save(
        self,
        state: RunState,
        config: TrainConfig,
        model: nn.Module,
        optimizer: optim.Optimizer,
        report: PolicyReport,
        lora: LoRAConfig,
    ) -> None:
        """Write a whole checkpoint, point `adapters` at it, and drop the oldest beyond `checkpoint.keep`."""

        def fill(folder: Path) -> None:
            save_adapter(model, folder, lora, report.target_keys)
            mx.save_safetensors(str(folder / OPTIMIZER), dict(tree_flatten(optimizer.state)))
            contents = {"state": state.__dict__, "config": config.model_dump(mode="json")}
            (folder / STATE).write_text(json.dumps(contents, indent=2) + "\n")

        folder = self.checkpoints / f"step-{state.step:06d}"
        write_folder(folder, fill)
        point_link(self.adapters, folder)
        for old in self._saved()[: -config.checkpoint.keep]:
            shutil.rmtree(old)

    def restore(self, config: TrainConfig, model: nn.Module, optimizer: optim.Optimizer) -> RunState:
        """Load the newest checkpoint into model and optimizer and forget what was logged after it.

        Raises:
            RunError: there is no checkpoint, it cannot be read, or it belongs to another config.
        """
        saved = self._saved()
        if not saved:
            raise RunError(f"{self.path} has no checkpoint to resume from; start anew with --force.")
        folder = saved[-1]
        try:
            contents = json.loads((folder / STATE).read_text())
            state = RunState(**contents["state"])
            arrays = mx.load(str(folder / OPTIMIZER))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise RunError(
                f"checkpoint {folder} cannot be read ({error}); remove it to resume from the one before."
            ) from error
        self._check_config(folder, contents["config"], config)
        try:
            load_adapter(model, folder)
        except ModelError as error:
            raise RunError(f"checkpoint {folder}: {error}") from error
        optimizer.state = tree_unflatten(list(arrays.items()))
        mx.eval(optimizer.state)
        point_link(self.adapters, folder)
        for file in (self.metrics, self.rollouts, self.evaluations, self.events):
            kept = [row for row in read_lines(file) if row["step"] <= state.step]
            write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
        return state

    def _saved(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"))

    def _check_config(self, folder: Path, saved: dict[str, Any], config: TrainConfig) -> None:
        current = config.model_dump(mode="json")
        for name in sorted((saved.keys() | current.keys()) - FREE_ON_RESUME):
            if saved.get(name) != current.get(name):
                raise RunError(
                    f"checkpoint {folder} was made with {name} = {saved.get(name)!r}, the config has "
                    f"{current.get(name)!r}; resume with the same value, or start a new run."
                )


def open_run(config: TrainConfig, *, resume: bool = False, force: bool = False) -> RunFolder:
    """Make or find the folder of a run.

    Args:
        config: names the folder with `output`, or leaves it to the first free runs/ENVIRONMENT-ALGORITHM-NUMBER.
        resume: go on with the run that is there.
        force: replace the run that is there.

    Raises:
        RunError: the folder holds something and neither was asked for, holds no run, or there is nothing to resume.
    """
    path, batch_file = output_paths(config)
    folder = RunFolder(path, batch_file)
    if resume:
        if config.output is None:
            raise RunError("resuming needs the run's folder; name it with output.")
        if not folder.checkpoints.is_dir():
            raise RunError(f"{path} holds no run to resume.")
        return folder
    if path.exists() and any(path.iterdir()):
        if not force:
            raise RunError(f"{path} exists; go on with --resume, replace it with --force, or choose another output.")
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is not empty and holds no run, so it is not replaced; choose another output.")
        shutil.rmtree(path)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    write_text(path / "config.toml", config_toml(config))
    return folder


def output_paths(config: TrainConfig) -> tuple[Path, Path | None]:
    """The run folder, and the file for the last batch where `output` ends in .npz."""
    if config.output is not None:
        path = Path(config.output).expanduser()
        return (path.with_suffix(""), path) if path.suffix == ".npz" else (path, None)
    name = f"{Path(config.env_name.partition(':')[0]).stem}-{config.algorithm.name}"
    number = 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path, None
