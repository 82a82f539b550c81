"""Which libraries' environments have names, and how a library is loaded."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlxrl.env.names import load_object

LIBRARIES: Mapping[str, str] = {
    "gem": "mlxrl.env.adapters.gem:gem_suite",
    "gymnasium": "mlxrl.env.adapters.gymnasium:gymnasium_suite",
    "openenv": "mlxrl.env.adapters.openenv:openenv_suite",
    "reasoning-gym": "mlxrl.env.adapters.reasoning_gym:reasoning_gym_suite",
    "skyrl-gym": "mlxrl.env.adapters.skyrl_gym:skyrl_gym_suite",
    "textarena": "mlxrl.env.adapters.textarena:textarena_suite",
    "verifiers": "mlxrl.env.adapters.verifiers:verifiers_suite",
}
"""The builder of each library's suites: builder(name within the library, **options)."""


def library_builder(name: str) -> Callable[..., Any] | None:
    """The suite builder of a name such as "gymnasium:FrozenLake-v1", or None where it names no library's environment.

    Args:
        name: the library, in any spelling of its hyphens and capitals; a colon; and what the library calls it.
    """
    library, _, inner = name.partition(":")
    reference = LIBRARIES.get(library.lower().replace("_", "-"))
    if reference is None or not inner:
        return None
    suite = load_object(reference)
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
        raise ValueError(f'environments "{extra}:..." need a package; pip install "mlxrl-env[{extra}]"') from None


def cannot_be_had(name: str, error: Exception) -> ValueError:
    """The error for an environment that its library refuses to make, in one line."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # colours, for a terminal
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return ValueError(f"environment {name!r} cannot be had: {type(error).__name__}: {lines[0] if lines else ''}")
