"""Frozen records to plain JSON values and back, by their type hints.

A record becomes an object with its class name under "type".  Reading builds only the
classes that are named in the hints: a file is data, it executes nothing.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


class MalformedRecord(ValueError):
    """The value does not have the shape that its type hint asks for."""


def encode(value: Any) -> Any:
    """A JSON value for a record, a tuple of them, or a scalar; defaults are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        encoded = {"type": type(value).__name__}
        for name, default in _defaults(type(value)):
            field = getattr(value, name)
            if default is MISSING or field != default:
                encoded[name] = encode(field)
        return encoded
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(item) for item in value]
    return value


@cache
def _defaults(record: type) -> tuple[tuple[str, Any], ...]:
    """(field, its default, or MISSING) in the order of the class."""
    return tuple((field.name, field.default) for field in fields(record))


def decode(value: Any, hint: Any) -> Any:
    """The value that `hint` describes; `MalformedRecord` says where it differs."""
    origin = get_origin(hint)
    if origin is types.UnionType:
        return _decode_union(value, get_args(hint))
    if origin is Literal:
        return _expect(value, value in get_args(hint), f"one of {get_args(hint)}")
    if origin is tuple:
        return _decode_tuple(value, get_args(hint))
    if origin is frozenset:
        items = _decode_tuple(value, (*get_args(hint), ...))
        return frozenset(items)
    if is_dataclass(hint):
        return _decode_record(value, hint)
    if hint is type(None):
        return _expect(value, value is None, "null")
    exact = type(value) is hint or (hint is float and type(value) is int)
    return _expect(value, exact, getattr(hint, "__name__", str(hint)))


def _expect(value: Any, holds: bool, wanted: str) -> Any:
    if not holds:
        raise MalformedRecord(f"{wanted} expected, not {value!r:.60}")
    return value


def _decode_union(value: Any, members: Sequence[Any]) -> Any:
    if isinstance(value, Mapping) and "type" in value:
        named = [m for m in members if getattr(m, "__name__", None) == value["type"]]
        names = ", ".join(getattr(m, "__name__", str(m)) for m in members)
        _expect(value["type"], bool(named), f"one of {names}")
        return decode(value, named[0])
    records = [member for member in members if is_dataclass(member)]
    if isinstance(value, Mapping) and len(records) > 1:
        raise MalformedRecord("an object says by its type which of several it is")
    problem: MalformedRecord | None = None
    for member in members:
        try:
            return decode(value, member)
        except MalformedRecord as error:
            problem = error
    raise problem or MalformedRecord("nothing is allowed here")


def _decode_tuple(value: Any, items: Sequence[Any]) -> tuple[Any, ...]:
    _expect(value, isinstance(value, list), "a list")
    if len(items) == 2 and items[1] is ...:
        return tuple(decode(item, items[0]) for item in value)
    _expect(value, len(value) == len(items), f"a list of {len(items)}")
    return tuple(decode(item, hint) for item, hint in zip(value, items, strict=True))


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _decode_record(value: Any, record: Any) -> Any:
    _expect(value, isinstance(value, Mapping), f"an object of type {record.__name__}")
    given = {name: item for name, item in value.items() if name != "type"}
    _expect(value.get("type"), value.get("type") in (None, record.__name__), record.__name__)
    hints = _hints(record)
    unknown = sorted(set(given) - set(hints))
    _expect(unknown, not unknown, f"no other fields of {record.__name__}")
    decoded = {}
    for name, item in given.items():
        try:
            decoded[name] = decode(item, hints[name])
        except MalformedRecord as error:
            raise MalformedRecord(f"{record.__name__}.{name}: {error}") from None
    try:
        return record(**decoded)
    except (TypeError, ValueError) as error:
        raise MalformedRecord(f"{record.__name__}: {error}") from None
