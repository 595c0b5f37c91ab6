"""JSON as Apache RocketMQ reads and writes it, which is more than JSON. Spec:
docs/format/fastjson.md.

Its library writes keys of maps that are numbers or objects as they are (``{0:251}``), and reads
what people write by hand: names without quotes, single quotes, comments, commas too many. All legal
JSON is read as :func:`json.loads` reads it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cometmq.errors import StoreDamaged

BYTES_MAX = 256 * 1024 * 1024  # a million committed offsets have 20 MiB
DEPTH_MAX = 64
# An object or array that is a key, as text. RocketMQ's have a topic, a broker's name and a number;
# a key within a key within a key … doubles its backslashes at each level.
KEY_CHARS_MAX = 4096

Json = Any  # what json.loads gives

_GAP = re.compile(r"(?:[ \t\r\n\f\b\ufeff]++|//[^\n]*+|/\*(?:[^*]++|\*(?!/))*+\*/)*+")
_COMMAS = re.compile(rf"(?:,{_GAP.pattern})*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_$][\w$]*+")
_STRING = {
    '"': re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\]|\\.)*+)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {
    **{char: char for char in "\"'\\/"},
    **{str(digit): chr(digit) for digit in range(8)},
    **dict(zip("bfnrtv", "\b\f\n\r\t\v", strict=True)),
}
_WORDS = {"true": True, "false": False, "null": None}


def loads(data: bytes) -> Json:
    """The value in ``data``. Keys of maps are strings: a number's digits, an object's JSON.

    Raises StoreDamaged with the place of what is none of that.
    """
    if len(data) > BYTES_MAX:
        raise StoreDamaged(f"{len(data)} bytes of JSON are more than {BYTES_MAX}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise StoreDamaged(f"the JSON is not UTF-8: {error}") from error
    reader = _Reader(text)
    try:
        value = reader.value(DEPTH_MAX)
    except ValueError as error:  # a number of more digits than Python takes, half a character
        raise reader.refusal(str(error)) from error
    reader.skip(_GAP)
    if reader.at < len(text):
        raise reader.refusal("something follows the value")
    return value


class _Reader:
    """Reads from ``at`` on, which only moves forward."""

    def __init__(self, text: str) -> None:
        self.at = 0
        self._text = text

    def refusal(self, why: str) -> StoreDamaged:
        return StoreDamaged(f"no JSON at character {self.at}: {why}")

    def skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self._text, self.at)
        assert found is not None, "it matches nothing, too"
        self.at = found.end()

    def value(self, depth: int) -> Json:
        """``depth``: how many objects and arrays may be around what is inside."""
        first = self._next()
        if first in "{[":
            if not depth:
                raise self.refusal(f"more than {DEPTH_MAX} levels")
            return self._object(depth - 1) if first == "{" else self._array(depth - 1)
        if first in _STRING:
            return self._string(first)
        number = _NUMBER.match(self._text, self.at)
        if number is not None:
            self.at = number.end()
            return float(number[0]) if number[1] or number[2] else int(number[0])
        word = _WORD.match(self._text, self.at)
        if word is None or word[0] not in _WORDS:
            raise self.refusal("neither a value nor its beginning")
        self.at = word.end()
        return _WORDS[word[0]]

    def _next(self) -> str:
        """The next character that means something; empty at the end."""
        self.skip(_GAP)
        if self.at >= len(self._text):
            raise self.refusal("it ends too early")
        return self._text[self.at]

    def _object(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        while not self._closes("}"):
            key = self._key(depth)
            if self._next() != ":":
                raise self.refusal("a colon is missing")
            self.at += 1
            found[key] = self.value(depth)
            self._separated("}")
        return found

    def _array(self, depth: int) -> list[Json]:
        found: list[Json] = []
        while not self._closes("]"):
            found.append(self.value(depth))
            self._separated("]")
        return found

    def _closes(self, bracket: str) -> bool:
        """Whether the object or array ends here. Steps over its brackets, and over commas too
        many.
        """
        if self._text[self.at] in "{[,":
            self.at += 1
            self.skip(_GAP)
            self.skip(_COMMAS)
        if self._next() != bracket:
            return False
        self.at += 1
        return True

    def _separated(self, bracket: str) -> None:
        if self._next() not in f",{bracket}":
            raise self.refusal("a comma is missing")

    def _key(self, depth: int) -> str:
        if self._next() in _STRING:
            return self._string(self._text[self.at])
        name = _WORD.match(self._text, self.at)
        if name is not None:
            self.at = name.end()
            return name[0]
        start = self.at
        value = self.value(depth)
        if not isinstance(value, dict | list):
            return self._text[start : self.at]
        key = json.dumps(value, sort_keys=True, ensure_ascii=False)
        if len(key) > KEY_CHARS_MAX:
            raise self.refusal(f"a key has more than {KEY_CHARS_MAX} characters")
        return key

    def _string(self, quote: str) -> str:
        found = _STRING[quote].match(self._text, self.at)
        if found is None:
            raise self.refusal("a string does not end")
        text = found[1]
        if "\\" in text:
            text = _ESCAPE.sub(self._escaped, text)
            # Halves of a character that were escaped one by one become one.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        self.at = found.end()
        return text

    def _escaped(self, escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        if code:
            return chr(int(code, 16))
        char = _ESCAPED.get(escape[3])
        if char is None:
            raise self.refusal(f"a string has the escape \\{escape[3]}")
        return char
