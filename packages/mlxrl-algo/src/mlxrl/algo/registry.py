"""Algorithms by name."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from mlxrl.algo.algorithm import Algorithm
from mlxrl.algo.cispo import CISPOAlgorithm
from mlxrl.algo.dapo import DAPOAlgorithm
from mlxrl.algo.drgrpo import DrGRPOAlgorithm
from mlxrl.algo.gigpo import GiGPOAlgorithm
from mlxrl.algo.gmpo import GMPOAlgorithm
from mlxrl.algo.grpo import GRPOAlgorithm
from mlxrl.algo.gspo import GSPOAlgorithm
from mlxrl.algo.reinforcepp import REINFORCEPPAlgorithm
from mlxrl.algo.rloo import RLOOAlgorithm
from mlxrl.algo.sapo import SAPOAlgorithm

_ALGORITHMS: dict[str, type[Algorithm]] = {
    "cispo": CISPOAlgorithm,
    "dapo": DAPOAlgorithm,
    "dr-grpo": DrGRPOAlgorithm,
    "gigpo": GiGPOAlgorithm,
    "gmpo": GMPOAlgorithm,
    "grpo": GRPOAlgorithm,
    "gspo": GSPOAlgorithm,
    "reinforce++": REINFORCEPPAlgorithm,
    "rloo": RLOOAlgorithm,
    "sapo": SAPOAlgorithm,
}


def _key(name: str) -> str:
    """Return what two spellings of one name share: case, "-" and "_" do not count, and "+" may be written "p"."""
    return name.lower().replace("-", "").replace("_", "").replace("+", "p")


def algorithm_names() -> list[str]:
    """Return the names of all registered algorithms, sorted."""
    return sorted(_ALGORITHMS)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class registered under a name.

    Args:
        name: any spelling: case, "-" and "_" do not count, and "+" may be written "p".

    Returns:
        The class.

    Raises:
        ValueError: there is no such algorithm.
    """
    for known, algorithm in _ALGORITHMS.items():
        if _key(known) == _key(name):
            return algorithm
    raise ValueError(f"algorithm must be one of {', '.join(algorithm_names())}, got {name!r}")


def algorithm_options(name: str) -> Mapping[str, Any]:
    """Return the options of an algorithm and their defaults.

    Args:
        name: as for `algorithm_class`.

    Returns:
        A dict from option to default, in the order of declaration; an option without one has None.

    Raises:
        ValueError: there is no such algorithm.
    """
    options = fields(algorithm_class(name))  # pyright: ignore
    return {item.name: None if item.default is MISSING else item.default for item in options}


def make_algorithm(name: str, **options: Any) -> Algorithm:
    """Return an algorithm with the given options.

    Args:
        name: as for `algorithm_class`.
        options: fields of its class; the others keep their defaults.

    Returns:
        The algorithm, a frozen dataclass.

    Raises:
        ValueError: there is no such algorithm, it has no such option, or the option's value is of a wrong type, not
            finite or out of its bounds; the sentence names the algorithm, the option, the value and the options.
    """
    algorithm = algorithm_class(name)
    known = algorithm_options(name)
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"{algorithm.name}: {option} must be one of its options, {', '.join(known)}, got {option}={value!r}"
            )
    return algorithm(**options)


def register_algorithm(name: str, algorithm: type[Algorithm]) -> None:
    """Make an algorithm known under a name.

    Args:
        name: a name whose spellings are all free.
        algorithm: a frozen dataclass whose fields are its options.

    Raises:
        ValueError: the name is taken, or the class is not a dataclass.
    """
    taken = [known for known in _ALGORITHMS if _key(known) == _key(name)]
    if taken:
        raise ValueError(f"name must not be taken by another algorithm, got {name!r}, which is {taken[0]!r}")
    if not is_dataclass(algorithm):
        raise ValueError(f"algorithm must be a dataclass whose fields are its options, got {algorithm!r}")
    _ALGORITHMS[name] = algorithm
