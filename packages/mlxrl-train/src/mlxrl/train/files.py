"""Files that are whole or not there: written aside, flushed to disk, then renamed into place."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder appear with all its files.

    Args:
        path: the folder; one that is there already is replaced.
        fill: writes the files into the folder it is given.
    """
    aside = path.with_name(f".{path.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    fill(aside)
    for file in aside.iterdir():
        _sync(file)
    _sync(aside)
    if path.exists():
        shutil.rmtree(path)
    aside.rename(path)
    _sync(path.parent)


def point_link(link: Path, target: Path) -> None:
    """Point a relative symbolic link at a folder, replacing where it pointed before."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    if link.is_dir() and not link.is_symlink():  # a copy of the run, made by following links
        remove(link)
    aside.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    aside.replace(link)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects, a line each, and flush them to disk; numbers that are not finite, however deep, are null."""
    with path.open("a") as file:
        file.writelines(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; a last line that was cut off in writing is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
