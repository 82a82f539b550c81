"""Look-ups by name with helpful refusals, and objects named by a reference into a user's own code."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_folders: list[str] = []  # put on sys.path for users' code, the last one in front


def unknown(what: str, name: str, known: Iterable[str], hint: str = "") -> ValueError:
    """The error for a name that nothing goes by: the name, the nearest one, and all there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {name!r}{guess} (known: {', '.join(names) or 'none'}{hint})")


def is_reference(name: str) -> bool:
    """Whether a name points into a user's code, as "path/to/file.py:object" or "package.module:object" do."""
    return ":" in name


def load_object(reference: str) -> Any:
    """Loads the object that a reference names.

    Args:
        reference: "path/to/file.py:object", relative to the working directory, or "package.module:object".
            A file is loaded once, however many of its objects are asked for.

    A file may import what lies beside it, and a module is looked for in the working directory first: the folder goes
    to the front of sys.path and stays there, as for a script. Where two such folders have modules of the same name,
    each file gets its own, provided that it imports it while it is loaded and not later.

    Raises:
        ValueError: there is no such file, module or object, it is no Python, or loading it ended in sys.exit. What else
            the user's code raises itself passes through.
    """
    source, _, attribute = reference.rpartition(":")
    module = _load_file(reference, Path(source)) if source.endswith(".py") else _load_module(reference, source)
    if not hasattr(module, attribute):
        raise unknown(f"object of {source}:", attribute, (name for name in vars(module) if not name.startswith("_")))
    return getattr(module, attribute)


def _load_file(reference: str, path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{reference!r} names the file {path}, which does not exist; correct the path")
    name = f"mlxrl_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{reference!r} names {path}, which Python cannot load; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    _put_in_front(path.parent)
    try:
        with _told_ends(reference):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(reference: str, name: str) -> ModuleType:
    _put_in_front(Path.cwd())
    try:
        with _told_ends(reference):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"{reference!r} names the module {name!r}, which cannot be imported; "
            "install it, or give a file as path/to/file.py:object"
        ) from None


@contextmanager
def _told_ends(reference: str) -> Generator[None]:
    """Has sys.exit end the loading, and not the program, and has what is no Python name its own file and line."""
    try:
        yield
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{reference!r} cannot be loaded: {place.filename}, line {place.lineno}, ended it by "
            f"sys.exit({error.code!r}); put what only a script does under if __name__ == '__main__'"
        ) from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}: " if error.filename else ""  # a null byte has no line
        raise ValueError(f"{reference!r} cannot be loaded: {where}{error.msg}; correct it") from error


def _put_in_front(folder: Path) -> None:
    """Makes what lies in a folder importable, also where another of users' folders has lent its names already."""
    place = str(folder)
    if place in _folders:
        _folders.remove(place)
        sys.path[:] = [other for other in sys.path if other != place]
    if place not in sys.path:
        _folders.insert(0, place)
        sys.path.insert(0, place)
    for entry in folder.iterdir():
        name = entry.stem if entry.suffix == ".py" else entry.name
        if _home(sys.modules.get(name)) in set(_folders) - {place}:
            for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _home(module: ModuleType | None) -> str | None:
    """The folder that a module or package of its own file lies in."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file)
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)
