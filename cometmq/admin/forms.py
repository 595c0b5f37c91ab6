"""The forms of a command's result."""

from __future__ import annotations

TABLE = "table"
JSON = "json"
FORMS = (TABLE, JSON)
WIDE = "wide"  # a table with every column
