"""Which libraries' environments have names, and how a library is loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrl.env.names import load_object


@dataclass(frozen=True)
class Library:
    """A library whose environments have names.

    Args:
        module: what of it is imported.
        suite: where the builder of its suites is: builder(name within the library, **options).
        names: where the function is that lists the names within it; None where nothing lists them.
    """

    module: str
    suite: str
    names: str | None = None


_HERE = "mlxrl.env.adapters"

LIBRARIES: Mapping[str, Library] = {
    "gem": Library("gem", f"{_HERE}.gem:gem_suite", f"{_HERE}.gem:gem_names"),
    "gymnasium": Library("gymnasium", f"{_HERE}.gymnasium:gymnasium_suite", f"{_HERE}.gymnasium:gymnasium_names"),
    "openenv": Library("openenv", f"{_HERE}.openenv:openenv_suite"),
    "reasoning-gym": Library(
        "reasoning_gym", f"{_HERE}.reasoning_gym:reasoning_gym_suite", f"{_HERE}.reasoning_gym:reasoning_gym_names"
    ),
    "skyrl-gym": Library("skyrl_gym", f"{_HERE}.skyrl_gym:skyrl_gym_suite", f"{_HERE}.skyrl_gym:skyrl_gym_names"),
    "textarena": Library("textarena", f"{_HERE}.textarena:textarena_suite", f"{_HERE}.textarena:textarena_names"),
    "verifiers": Library("verifiers", f"{_HERE}.verifiers:verifiers_suite"),
}
"""The libraries by the names that stand before the colon, each an extra of this package."""


def is_installed(library: str) -> bool:
    """Whether a library is there; it is not imported."""
    return importlib.util.find_spec(LIBRARIES[library].module) is not None


def library_names(library: str) -> tuple[str, ...]:
    """The names of a library's environments, sorted; none where nothing lists them. The library is imported.

    Raises:
        ValueError: it is not installed; the message says how to get it.
    """
    if not is_installed(library):
        raise _missing(library)
    listing = LIBRARIES[library].names
    return () if listing is None else tuple(sorted(load_object(listing)()))


def library_builder(name: str) -> Callable[..., Any] | None:
    """The suite builder of a name such as "gymnasium:FrozenLake-v1", or None where it names no library's environment.

    Args:
        name: the library, in any spelling of its hyphens and capitals; a colon; and what the library calls it.
    """
    spelled, _, inner = name.partition(":")
    library = LIBRARIES.get(spelled.lower().replace("_", "-"))
    if library is None or not inner:
        return None
    suite = load_object(library.suite)
    builder = functools.partial(suite, inner)
    builder.__doc__ = suite.__doc__
    return builder


def load_library(module: str, extra: str) -> Any:
    """Imports a library that is an extra of this package.

    Raises:
        ValueError: it is not installed; the message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise  # the library is there; something that it imports is not
        raise _missing(extra) from None


def _missing(extra: str) -> ValueError:
    return ValueError(f'environments "{extra}:..." need a package; pip install "mlxrl-env[{extra}]"')


def cannot_be_had(name: str, error: Exception) -> ValueError:
    """The error for an environment that its library refuses to make, in one line."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # colours, for a terminal
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return ValueError(f"environment {name!r} cannot be had: {type(error).__name__}: {lines[0] if lines else ''}")
