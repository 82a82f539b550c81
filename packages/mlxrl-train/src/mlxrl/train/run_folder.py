"""A run on disk: its config, what happened in every step, and checkpoints to go on from."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy import LoRAConfig, ModelError, PolicyReport, load_adapter, save_adapter
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import config_toml, load_config
from mlxrl.train.errors import RunFolderError
from mlxrl.train.files import (
    append_lines,
    aside,
    cut_off,
    point_link,
    read_lines,
    remove,
    size_of_lines,
    write_folder,
    write_text,
)
from mlxrl.train.folder_lock import FolderLock, holds_something
from mlxrl.train.inputs import data_digests

STATE, OPTIMIZER, DIGESTS = "state.json", "optimizer.safetensors", "sha256.json"
CHOICE = "rollout_weights"
"""Name of the event that a choice of the rollouts' weights was made."""
# Fields that may change between a run and its continuation, for they change nothing of what the steps compute; `steps`
# is one of them as long as the learning rate does not fall towards the last step.
FREE_ON_RESUME = {"output", "code_folder", "eval", "checkpoint", "logging"}
FREE_FOR_MEMORY = {
    "gradient_checkpointing",
    "micro_batch_size",
    "update.max_tokens_per_micro_batch",
    "rollout_mode",
    "rollout.width",
    "rollout.kv_budget_gb",
    "rollout.env_timeout",
    "iogpu_wired_limit_mb",
}
"""How much room rollouts and updates have, and how long rollouts wait: a run that was killed for memory may go on with
less. Its numbers are then those of the same steps within rounding, and with dropout those of other draws."""


@dataclass
class RunState:
    """Where a run stands; with the adapter and the optimizer's state, all that the next step depends on.

    Args:
        step: steps taken.
        position: tasks drawn.
        nonfinite_in_a_row: steps since the last whose policy and gradient were finite.
        uninformative_in_a_row: steps since the last in which a group was kept.
        unscored_in_a_row: steps since the last in which a trajectory had a reward.
        failing_rewards: steps in a row in which a reward function failed on every row, by its name.
        rollout_weights: what rollouts sample from, where the config leaves it open and it has been chosen.
        mismatched: whether the last step's sampler was too far from the policy.
        memory_warned: whether it was said that a step took much memory.
        group_warned: whether it was said that members of a group began differently.
        data: digests of the files of tasks, by the fields that name them.
    """

    step: int = 0
    position: int = 0
    nonfinite_in_a_row: int = 0
    uninformative_in_a_row: int = 0
    unscored_in_a_row: int = 0
    failing_rewards: dict[str, int] = field(default_factory=dict)
    rollout_weights: Literal["shared", "merged"] | None = None
    mismatched: bool = False
    memory_warned: bool = False
    group_warned: bool = False
    data: dict[str, str] = field(default_factory=dict)


class RunFolder:
    """The folder of one run; see `open_run`."""

    def __init__(self, path: Path, batch_file: Path | None = None):
        self.path, self.batch_file = path, batch_file
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.adapters = path / "adapters"
        self.initial_adapter = path / "initial_adapter"
        self.lock = FolderLock(path)

    @property
    def logs(self) -> tuple[Path, ...]:
        """The files of lines."""
        return self.metrics, self.rollouts, self.evaluations, self.events

    def start(self, config: TrainConfig, model: nn.Module, report: PolicyReport, lora: LoRAConfig) -> None:
        """Remove what an earlier run left, and write the config at last; other files stay.

        An adapter that the run continues from is copied into the folder, for its own may change.
        """
        self._clear()
        self.checkpoints.mkdir(exist_ok=True)

        def fill(folder: Path) -> None:
            save_adapter(model, folder, lora, report.target_keys)
            (folder / DIGESTS).write_text(json.dumps(_digests(folder), indent=2) + "\n")

        if config.adapter is not None:
            write_folder(self.initial_adapter, fill)
        write_text(self.config, config_toml(config))

    def _clear(self) -> None:
        """Remove what a run makes, but the config, which tells that a run was here until another takes its place."""
        for path in (*self.logs, self.adapters, self.initial_adapter):
            remove(path)
        for path in (self.config, self.adapters, self.initial_adapter):
            remove(aside(path))
        for folder in (*self.checkpoints.glob("step-*"), *self.checkpoints.glob(".step-*.new")):
            shutil.rmtree(folder)

    def started_from(self, config: TrainConfig) -> Path | None:
        """The folder's own copy of the adapter that the run continues from, if it continues from one.

        Raises:
            RunFolderError: the copy is missing or is not what was saved.
        """
        if config.adapter is None:
            return None
        try:
            _check_digests(self.initial_adapter, json.loads((self.initial_adapter / DIGESTS).read_text()))
        except (OSError, ValueError, AttributeError) as error:
            raise RunFolderError(
                f"{self.initial_adapter}, which the run started from, cannot be used ({error}); start a new run."
            ) from error
        return self.initial_adapter

    def log(self, file: Path, *rows: dict[str, Any]) -> None:
        """Append rows to one of the folder's files of lines."""
        if rows:
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
        """Write a whole checkpoint, point `adapters` at it, and drop the oldest beyond `checkpoint.keep`.

        While steps are not finite none is dropped: the policy may be broken, and those before it are what is left.
        """

        def fill(folder: Path) -> None:
            save_adapter(model, folder, lora, report.target_keys)
            mx.save_safetensors(str(folder / OPTIMIZER), dict(tree_flatten(optimizer.state)))
            contents = {
                "state": state.__dict__,
                "config": config.model_dump(mode="json"),
                "sha256": _digests(folder),
            }
            (folder / STATE).write_text(json.dumps(contents, indent=2) + "\n")

        folder = self.checkpoints / _name(state.step)
        write_folder(folder, fill)
        point_link(self.adapters, folder)
        self._drop_oldest(state, config)

    def _drop_oldest(self, state: RunState, config: TrainConfig) -> None:
        if not state.nonfinite_in_a_row:
            for old in self._saved()[: -config.checkpoint.keep]:
                shutil.rmtree(old)

    def saved_before(self, step: int) -> Path | None:
        """The newest checkpoint of fewer steps, if there is one."""
        return max((folder for folder in self._saved() if folder.name < _name(step)), default=None)

    def restore(self, config: TrainConfig, model: nn.Module, optimizer: optim.Optimizer) -> RunState:
        """Load the newest checkpoint into model and optimizer and forget what was logged after it.

        A run that has no checkpoint yet starts over; of its past stands what was measured at its start.

        Raises:
            RunFolderError: the checkpoint cannot be read, is damaged, or belongs to another config.
        """
        saved = self._saved()
        if saved:
            state = self._load(saved[-1], config, model, optimizer)
            point_link(self.adapters, saved[-1])
        else:
            state = RunState(data=data_digests(config))
            self._check_config(self.config, load_config(self.config).model_dump(mode="json"), config)
        if state.step > config.steps:
            raise RunFolderError(
                f"{self.path} has taken {state.step} steps already; set steps to more, not {config.steps}."
            )
        sizes: dict[Path, int] = {}
        for file in filter(Path.exists, self.logs):
            try:
                sizes[file] = size_of_lines(file, (lambda row: row["step"] <= state.step) if saved else _is_choice)
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{file} is damaged ({error}); remove it to resume without its past.") from error
        for file, size in sizes.items():
            cut_off(file, size)
        if not saved:
            for choice in read_lines(self.events):
                state.rollout_weights = choice["weights"]
        write_text(self.config, config_toml(config))
        self._drop_oldest(state, config)  # a run may be killed after its last save, before it did
        return state

    def _load(self, folder: Path, config: TrainConfig, model: nn.Module, optimizer: optim.Optimizer) -> RunState:
        try:
            contents = json.loads((folder / STATE).read_text())
            state, digests = RunState(**contents["state"]), dict(contents["sha256"])
            if _name(state.step) != folder.name:
                raise ValueError(f"{STATE} says step {state.step}")
            _check_digests(folder, digests)
            self._check_config(folder, dict(contents["config"]), config, state.data)
            arrays = mx.load(str(folder / OPTIMIZER))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"checkpoint {folder} cannot be used ({error}); remove it to resume from the one before."
            ) from error
        try:
            load_adapter(model, folder)
        except ModelError as error:
            raise RunFolderError(f"checkpoint {folder}: {error}") from error
        optimizer.state = tree_unflatten(list(arrays.items()))  # pyright: ignore  (a .safetensors file is a dict)
        mx.eval(optimizer.state)  # before the files may change
        return state

    def release(self) -> None:
        """Let other processes run in the folder again; where no run has started in it, nothing of one stays."""
        has_run = self.config.is_file()
        if not has_run and self.lock.is_new:
            self._clear()
            remove(self.checkpoints)
        self.lock.give_back(unused=not has_run)

    def _saved(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"))

    def _check_config(
        self, where: Path, saved: dict[str, Any], config: TrainConfig, data: Mapping[str, str] | None = None
    ) -> None:
        free = FREE_ON_RESUME | ({"steps"} if config.optimizer.schedule == "constant" else set())
        then, now = _leaves(saved), _leaves(config.model_dump(mode="json"))
        digests = data_digests(config)
        for name, digest in (data or {}).items():
            if name not in digests:
                continue  # told below
            if digests[name] != digest:
                raise RunFolderError(
                    f"{name} = {now[name]!r} does not hold the tasks that {where} was made with, which were read from "
                    f"{then[name]!r}; put them back, set {name} to where they lie now, or start a new run."
                )
            then[name] = now[name]  # the same tasks, wherever they lie
        for name in sorted(then.keys() | now.keys()):
            is_free = name.partition(".")[0] in free or name in FREE_FOR_MEMORY
            if not is_free and then.get(name) != now.get(name):
                raise RunFolderError(
                    f"{where} was made with {name} = {then.get(name)!r}, the config has {now.get(name)!r}; "
                    "resume with the same value, or start a new run."
                )


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _is_choice(row: dict[str, Any]) -> bool:
    """Whether a line tells what was measured before the first step: measured again, it might come out otherwise."""
    return row.get("event") == CHOICE and row["step"] == 0


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: _digest(file) for file in sorted(folder.iterdir())}


def _check_digests(folder: Path, digests: dict[str, str]) -> None:
    for name, digest in digests.items():
        if _digest(folder / name) != digest:
            raise ValueError(f"{name} is not what was saved")


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's fields by their dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return leaves


def open_run(config: TrainConfig, *, resume: bool = False, force: bool = False) -> RunFolder:
    """Find the folder of a run, refuse one that cannot be used, and keep other processes from it until its `release`.

    Args:
        config: names the folder with `output`, or leaves it to the first free runs/ENVIRONMENT-ALGORITHM-NUMBER.
        resume: go on with the run that is there.
        force: replace the run that is there.

    Raises:
        RunFolderError: the folder cannot be made, holds something and neither was asked for, holds no run, another
            process runs in it, or there is nothing to resume.
    """
    if resume and config.output is None:
        raise RunFolderError("resuming needs the run's folder; name it with output.")
    folder = RunFolder(*output_paths(config))
    try:
        if config.output is None:
            while not folder.lock.take(new=True):  # another process was faster
                folder = RunFolder(*output_paths(config))
            return folder
        _check(folder, resume=resume, force=force)
        if not folder.lock.take():
            raise RunFolderError(
                f"another process runs in {folder.path}; wait until it ends or stop it, or choose another output."
            )
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"output = {str(folder.path)!r} cannot be a folder here ({error}); choose another."
        ) from error
    try:
        _check(folder, resume=resume, force=force)  # another process may have run in it since
    except RunFolderError:
        folder.release()
        raise
    return folder


def _check(folder: RunFolder, *, resume: bool, force: bool) -> None:
    """Refuse a folder that holds something else than is asked for; arguments as for `open_run`."""
    path = folder.path
    if folder.batch_file is not None and folder.batch_file.is_dir():
        raise RunFolderError(f"{folder.batch_file} is a folder, and the batch needs a file; choose another output.")
    holds_run = folder.config.is_file() and folder.checkpoints.is_dir()
    if resume:
        if not holds_run:
            raise RunFolderError(f"{path} holds no run to resume; name the folder of one, or leave out --resume.")
    elif os.path.lexists(path) and not path.is_dir():
        raise RunFolderError(f"{path} is a file, and a run needs a folder; choose another output.")
    elif path.is_dir() and holds_something(path):
        if not force:
            raise RunFolderError(
                f"{path} exists; go on with --resume, replace it with --force, or choose another output."
            )
        if not holds_run:
            raise RunFolderError(f"{path} is not empty and holds no run, so it is not replaced; choose another output.")


def output_paths(config: TrainConfig) -> tuple[Path, Path | None]:
    """The run folder, and the file for the last batch where `output` ends in .npz."""
    if config.output is not None:
        path = Path(config.output).expanduser().absolute()
        return (path.with_suffix(""), path) if path.suffix == ".npz" else (path, None)
    name = f"{Path(config.env_name.partition(':')[0]).stem}-{config.algorithm.name}"
    number = 1
    while os.path.lexists(path := Path("runs") / f"{name}-{number:03d}"):
        number += 1
    return path.absolute(), None
