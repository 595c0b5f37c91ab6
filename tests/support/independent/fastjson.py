"""The JSON of RocketMQ's tables as ``docs/format/fastjson.md`` tells it: a part of the independent
reader (:mod:`tests.support.independent.reader`), with the standard library alone.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.independent.record import broken, expect

LEVELS_MAX = 64
KEY_CHARACTERS_MAX = 4096

_BLANK = re.compile(r"(?:[ \t\r\n]|/\*.*?\*/|//[^\n]*)*", re.DOTALL)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_LETTERS = dict(zip("bfnrtv\"'\\/", "\b\f\n\r\t\v\"'\\/", strict=True))
_WORDS = {"true": True, "false": False, "null": None}


def _unescape(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        return chr(int(code, 16))
    letter = found[3]
    expect(letter in _LETTERS or letter in "01234567", letter, "no escape")
    return _LETTERS.get(letter) or chr(int(letter))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def document(self) -> Any:
        value = self._value(1)
        self._skip()
        expect(self._at == len(self._text), self._at, "text behind the value")
        return value

    def _skip(self) -> None:
        found = _BLANK.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, text: str) -> bool:
        self._skip()
        taken = self._text.startswith(text, self._at)
        self._at += len(text) if taken else 0
        return taken

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip()
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _value(self, level: int) -> Any:
        expect(level <= LEVELS_MAX, self._at, "too many levels")
        if self._take("{"):
            return self._object(level)
        if self._take("["):
            return self._array(level)
        if found := self._match(_STRING):
            return _text_of(found)
        if found := self._match(_NUMBER):
            return json.loads(found[0])
        if (found := self._match(_NAME)) and found[0] in _WORDS:
            return _WORDS[found[0]]
        broken(self._at, "no value")

    def _object(self, level: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._ends("}", bool(made)):
            key = self._key(level)
            expect(self._take(":"), self._at, "a colon is missing")
            made[key] = self._value(level + 1)
        return made

    def _array(self, level: int) -> list[Any]:
        made: list[Any] = []
        while not self._ends("]", bool(made)):
            made.append(self._value(level + 1))
        return made

    def _ends(self, end: str, needs_comma: bool) -> bool:
        """At the end, or in front of a further element; commas may be more than one."""
        commas = 0
        while self._take(","):
            commas += 1
        if self._take(end):
            return True
        expect(commas > 0 or not needs_comma, self._at, "a comma is missing")
        return False

    def _key(self, level: int) -> str:
        if found := self._match(_NAME) or self._match(_NUMBER):
            return found[0]
        key = self._value(level + 1)
        if isinstance(key, str):
            return key
        text = json.dumps(key, sort_keys=True, ensure_ascii=False)
        expect(len(text) <= KEY_CHARACTERS_MAX, self._at, "too long for a key")
        return text


def _text_of(found: re.Match[str]) -> str:
    return _ESCAPE.sub(_unescape, found[1] if found[1] is not None else found[2])


def read_fastjson(data: bytes) -> Any:
    """Errors: Broken, and UnicodeDecodeError."""
    return _Reader(data.decode().removeprefix("\ufeff")).document()
