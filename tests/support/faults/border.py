"""Requests at the ends of what their fields can hold, generated from the contract's descriptors.

A *usual* request has a sensible value in every field; a variant differs from it in one field, at
any depth. Usual values are found by ``Message.field``, then by ``field``; one that is a function is
asked anew for each request.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cometmq import v1

Usual = Mapping[str, Any]
Path = tuple[str, ...]
Change = Callable[[Any], None]  # of the message that has the field

_MANY = 5_000  # above every limit of a list that has one, but for those of watches
_F = FieldDescriptor
_TEXTS = ("", "x" * 70_000, "a\nb", "\0", "日本", "%s{0}")
_NUMBERS: dict[int, tuple[float, ...]] = {
    _F.CPPTYPE_INT32: (0, -1, 1, 2**31 - 1, -(2**31)),
    _F.CPPTYPE_INT64: (0, -1, 1, 2**31, 2**63 - 1, -(2**63)),
    _F.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    _F.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
    _F.CPPTYPE_BOOL: (0, 1),
    _F.CPPTYPE_DOUBLE: (0.0, -1.0, 1e308, math.inf, -math.inf, math.nan),
}


def services() -> dict[str, ServiceDescriptor]:
    """Every service of the contract, by name."""
    found: dict[str, ServiceDescriptor] = {}
    for module in pkgutil.iter_modules(v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"{v1.__name__}.{module.name}")
            found.update(file.DESCRIPTOR.services_by_name)
    return found


def usual_request(kind: Descriptor, usual: Usual, branch: Path = ()) -> Any:
    """``branch`` names the fields of unions that are chosen; else the first of each is."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.containing_oneof and not _chosen(field, branch):
            continue
        value = _usual_value(field, usual)
        if field.message_type is None:
            if value is not None:
                _put(field, value, message)
        elif not _is_map(field):
            inner = usual_request(field.message_type, usual, branch[1:])
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
    return message


def variants(kind: Descriptor, usual: Usual) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What each variant changes, and how to make it."""
    for path, fields in _paths(kind):
        for name, change in _changes(fields[-1]):
            yield f"{kind.name}.{'.'.join(path)} = {name}", _maker(kind, usual, path, change)


def _maker(kind: Descriptor, usual: Usual, path: Path, change: Change) -> Callable[[], Any]:
    def make() -> Any:
        message = usual_request(kind, usual, path)
        change(_parent(message, path))
        return message

    return make


def _paths(kind: Descriptor) -> Iterator[tuple[Path, tuple[FieldDescriptor, ...]]]:
    """Every field, and those within it."""
    for field in kind.fields:
        yield (field.name,), (field,)
        if field.message_type is not None and not _is_map(field):
            for path, fields in _paths(field.message_type):
                yield (field.name, *path), (field, *fields)


def _parent(message: Message, path: Path) -> Any:
    for name in path[:-1]:
        inner = getattr(message, name)
        message = inner if isinstance(inner, Message) else inner[0]
    return message


def _changes(field: FieldDescriptor) -> Iterator[tuple[str, Change]]:
    yield "absent", lambda parent: parent.ClearField(field.name)
    if _is_map(field):
        for pairs in (
            {"": ""},
            {"k": "x" * 70_000},
            {"\1": "\2"},
            {f"k{n}": "v" for n in range(_MANY)},
        ):
            yield f"{len(pairs)} pairs", partial(_fill, field, pairs)
        return
    if field.is_repeated:
        for count in (2, _MANY):
            yield f"{count} times", partial(_repeat, field, count)
    for value in _extremes(field):
        yield f"{value!r:.40}", partial(_put, field, value)


def _fill(field: FieldDescriptor, pairs: Mapping[str, str], parent: Any) -> None:
    getattr(parent, field.name).update(pairs)


def _repeat(field: FieldDescriptor, count: int, parent: Any) -> None:
    values = getattr(parent, field.name)
    if not values:  # of numbers, usually empty
        values.append(1)
    values.extend([values[0]] * (count - 1))


def _put(field: FieldDescriptor, value: Any, parent: Any) -> None:
    if field.is_repeated:
        values = getattr(parent, field.name)
        del values[:]
        values.append(value)
    else:
        setattr(parent, field.name, value)


def _extremes(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.message_type is not None:
        return ()
    if field.type == _F.TYPE_BYTES:
        return (b"", b"\0" * 100, b"\xff" * 70_000)
    if field.cpp_type == _F.CPPTYPE_STRING:
        return _TEXTS
    return _NUMBERS[field.cpp_type]


def _usual_value(field: FieldDescriptor, usual: Usual) -> Any:
    kind = field.containing_type
    assert kind is not None
    for name in (f"{kind.name}.{field.name}", field.name):
        if name in usual:
            value = usual[name]
            return value() if callable(value) else value
    return "" if field.is_repeated and field.type == _F.TYPE_STRING else None


def _chosen(field: FieldDescriptor, branch: Path) -> bool:
    union = field.containing_oneof
    assert union is not None
    names = [one.name for one in union.fields]
    wanted = branch[0] if branch and branch[0] in names else names[0]
    return bool(field.name == wanted)


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
