"""The files that a config names: where they lie, and whether they are still what they were."""

import hashlib
from pathlib import Path
from typing import Any

from mlxrl.train.config import TrainConfig
from mlxrl.train.errors import ConfigError

DATA_FIELDS = ("path", "eval_path")


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config with its run folder, adapter, files of data and folder of code, as they lie here, seen from the root.

    What lies on the hub keeps its name, and so do models, which are loaded before the run, and environments and
    rewards, whose names are those of metrics: files of code are seen from `code_folder`.
    """
    changes: dict[str, Any] = {
        name: _absolute(path)
        for name in ("output", "adapter", "code_folder")
        if (path := getattr(config, name)) is not None
    }
    if config.code_folder is None and names_relative_code(config):
        changes["code_folder"] = str(Path.cwd())
    if config.data is not None:
        paths = {name: path for name in DATA_FIELDS if (path := getattr(config.data, name)) is not None}
        local = {name: _absolute(path) for name, path in paths.items() if not path.startswith("hf:")}
        changes["data"] = config.data.model_copy(update=local)
    return config.model_copy(update=changes)


def names_relative_code(config: TrainConfig) -> bool:
    """Whether the environment or a reward is of a file that is named by a relative path."""
    references = [config.env_name, *(reward.name for reward in config.rewards)]
    return any(in_folder("/", reference) != reference for reference in references)


def in_folder(folder: str | None, reference: str) -> str:
    """A reference "path/to/file.py:object" as it is seen from a folder; any other name as it is."""
    file, _, name = reference.rpartition(":")
    if folder is None or not file.endswith(".py"):
        return reference
    return f"{Path(folder, Path(file).expanduser())}:{name}"


def data_digests(config: TrainConfig) -> dict[str, str]:
    """The digest of each local file or folder of tasks, by the dotted name of its field.

    Raises:
        ConfigError: one cannot be read.
    """
    if config.data is None:
        return {}
    paths = {f"data.{name}": path for name in DATA_FIELDS if (path := getattr(config.data, name)) is not None}
    return {name: _digest(name, Path(path)) for name, path in paths.items() if not path.startswith("hf:")}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _digest(name: str, path: Path) -> str:
    digest = hashlib.sha256()
    try:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() or not path.is_dir():
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
    except OSError as error:
        raise ConfigError(f"{name} = {str(path)!r} cannot be read: {error}.") from None
    return digest.hexdigest()
