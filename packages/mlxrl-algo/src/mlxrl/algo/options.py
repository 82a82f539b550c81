"""Options of algorithms: the fields of a frozen dataclass, checked when it is built."""

import math
import types
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, Union, get_args, get_origin, get_type_hints


class OptionsHolder(Protocol):
    """A dataclass with a name whose fields are its options."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class Bounds:
    """The interval an option must lie in, written as in mathematics: ends "(]" leave out low and include high."""

    low: float
    high: float
    ends: str

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        below = value < self.high if self.ends[1] == ")" else value <= self.high
        return above and below

    def __str__(self) -> str:
        return f"{self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


def option(default: Any, low: float, high: float = math.inf, ends: str = "[)") -> Any:
    """Return a dataclass field for a number that must lie between two bounds.

    Args:
        default: the field's default.
        low: the lower bound.
        high: the upper bound.
        ends: "[" or "(" and "]" or ")": whether the bounds themselves are allowed.

    Returns:
        A `dataclasses.field` that `check_options` reads.
    """
    return field(default=default, metadata={"bounds": Bounds(low, high, ends)})


def option_error(algorithm: type[OptionsHolder], name: str, must: str, value: object) -> ValueError:
    """Return the error of a bad option; it names the algorithm, the option, the value and the options there are."""
    known = ", ".join(item.name for item in fields(algorithm))
    return ValueError(f"{algorithm.name}: {name} must be {must}, got {value!r}; its options are {known}")


def check_options(algorithm: OptionsHolder) -> None:
    """Raise ValueError if a field of the algorithm has a wrong type, is NaN or infinite, or lies out of its bounds.

    Args:
        algorithm: an instance of a dataclass whose numbers were declared with `option` or plainly.

    Raises:
        ValueError: naming the algorithm, the option, the value and the options there are.
    """
    hints = get_type_hints(type(algorithm))
    for item in fields(algorithm):
        value: object = getattr(algorithm, item.name)
        bounds: Bounds | None = item.metadata.get("bounds")
        must = _requirement(hints[item.name], bounds)
        if not _fits(value, hints[item.name], bounds):
            raise option_error(type(algorithm), item.name, must, value)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_number(value: object, kind: Any) -> TypeGuard[float]:
    """Say whether value is a finite int, or where `kind` is float a finite number; bools are neither."""
    allowed = int if kind is int else (int, float)
    return isinstance(value, allowed) and not isinstance(value, bool) and math.isfinite(value)


def _fits(value: object, hint: Any, bounds: Bounds | None) -> bool:
    for kind in _members(hint):
        if get_origin(kind) is Literal:
            fits = any(value is choice or value == choice for choice in get_args(kind))
        elif kind is float or kind is int:
            fits = _is_number(value, kind) and (bounds is None or value in bounds)
        else:
            fits = not isinstance(kind, type) or isinstance(value, kind)
        if fits:
            return True
    return False


def _requirement(hint: Any, bounds: Bounds | None) -> str:
    names: list[str] = []
    for kind in _members(hint):
        if get_origin(kind) is Literal:
            names += [str(choice) for choice in get_args(kind)]
        elif kind is float or kind is int:
            noun = "a finite number" if kind is float else "an integer"
            names.append(noun if bounds is None else f"{noun} in {bounds}")
        else:
            names.append("None" if kind is types.NoneType else "true or false" if kind is bool else kind.__name__)
    return " or ".join(names)
