"""A validator for the part of JSON Schema that describes plain data; what it does not know it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

Check = Callable[[Any], bool]

_TYPES: dict[str, Check] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}
# Keywords that say something of values of one type, and nothing of others.
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "exclusiveMaximum": ("number", lambda value, limit: value < limit),
    "exclusiveMinimum": ("number", lambda value, limit: value > limit),
    "maxItems": ("array", lambda value, limit: len(value) <= limit),
    "maxLength": ("string", lambda value, limit: len(value) <= limit),
    "maximum": ("number", lambda value, limit: value <= limit),
    "minItems": ("array", lambda value, limit: len(value) >= limit),
    "minLength": ("string", lambda value, limit: len(value) >= limit),
    "minimum": ("number", lambda value, limit: value >= limit),
}
_ANNOTATIONS = {"$comment", "$id", "$schema", "default", "description", "examples", "title"}


def schema_check(schema: Any, where: str = "schema") -> Check:
    """Compiles a schema into a function that tells whether a JSON value fits it.

    Known are type, enum, const, the limits of numbers, strings and arrays, pattern, items, properties, required,
    additionalProperties, anyOf, allOf, oneOf and not.

    Args:
        schema: the schema as parsed JSON.
        where: what messages call it.

    Raises:
        ValueError: the schema is malformed, or has a keyword that is not known here.
    """
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} must be a table or true or false, got {schema!r}")
    fields = cast(Mapping[str, Any], schema)
    checks: list[Check] = []
    for key, rule in fields.items():
        place = f"{where}.{key}"
        if key in _LIMITS:
            checks.append(_limit(key, rule, place))
        elif key in _RULES:
            checks.append(_RULES[key](rule, place, fields))
        elif key not in _ANNOTATIONS:
            known = ", ".join(sorted((*_LIMITS, *_RULES)))
            raise ValueError(f"{place} is a keyword that is not known here (known: {known}); leave it out")
    return lambda value: all(check(value) for check in checks)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1, but 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        items, others = cast(list[Any], one), cast(list[Any], other)
        return len(items) == len(others) and all(map(_same, items, others))
    if isinstance(one, dict) and isinstance(other, dict):
        fields, rest = cast(dict[str, Any], one), cast(dict[str, Any], other)
        return fields.keys() == rest.keys() and all(_same(fields[key], rest[key]) for key in fields)
    return one == other


def _limit(key: str, rule: Any, place: str) -> Check:
    if not _is_number(rule):
        raise ValueError(f"{place} must be a number, got {rule!r}")
    kind, fits = _LIMITS[key]
    return lambda value: not _TYPES[kind](value) or fits(value, rule)


def _type(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    names = [rule] if isinstance(rule, str) else _listed(rule, place)
    for name in names:
        if name not in _TYPES:
            raise ValueError(f"{place} must be one of {', '.join(_TYPES)}, got {name!r}")
    return lambda value: any(_TYPES[name](value) for name in names)


def _enum(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    members = _listed(rule, place)
    return lambda value: any(_same(value, member) for member in members)


def _const(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    return lambda value: _same(value, rule)


def _pattern(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    try:
        compiled = re.compile(rule)
    except (re.error, TypeError) as error:
        raise ValueError(f"{place} must be a regular expression, got {rule!r}: {error}") from None
    return lambda value: not isinstance(value, str) or compiled.search(value) is not None


def _items(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    check = schema_check(rule, place)
    return lambda value: not isinstance(value, list) or all(map(check, cast(list[Any], value)))


def _properties(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    checks = {name: schema_check(inner, f"{place}.{name}") for name, inner in _table(rule, place).items()}
    return lambda value: (
        not isinstance(value, dict) or all(check(value[name]) for name, check in checks.items() if name in value)
    )


def _additional(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    check = schema_check(rule, place)
    known = set(_table(schema.get("properties", {}), place))
    return lambda value: (
        not isinstance(value, dict)
        or all(check(inner) for name, inner in cast(dict[str, Any], value).items() if name not in known)
    )


def _required(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    names = _listed(rule, place)
    return lambda value: not isinstance(value, dict) or all(name in value for name in names)


def _any_of(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    checks = [schema_check(inner, place) for inner in _listed(rule, place)]
    return lambda value: any(check(value) for check in checks)


def _all_of(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    checks = [schema_check(inner, place) for inner in _listed(rule, place)]
    return lambda value: all(check(value) for check in checks)


def _one_of(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    checks = [schema_check(inner, place) for inner in _listed(rule, place)]
    return lambda value: sum(check(value) for check in checks) == 1


def _not(rule: Any, place: str, schema: Mapping[str, Any]) -> Check:
    check = schema_check(rule, place)
    return lambda value: not check(value)


def _listed(rule: Any, place: str) -> Sequence[Any]:
    if not isinstance(rule, list | tuple):
        raise ValueError(f"{place} must be a list, got {rule!r}")
    return cast(Sequence[Any], rule)


def _table(rule: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(rule, Mapping):
        raise ValueError(f"{place} must be a table, got {rule!r}")
    return cast(Mapping[str, Any], rule)


_RULES: dict[str, Callable[[Any, str, Mapping[str, Any]], Check]] = {
    "additionalProperties": _additional,
    "allOf": _all_of,
    "anyOf": _any_of,
    "const": _const,
    "enum": _enum,
    "items": _items,
    "not": _not,
    "oneOf": _one_of,
    "pattern": _pattern,
    "properties": _properties,
    "required": _required,
    "type": _type,
}
