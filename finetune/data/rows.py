"""Rows as a source delivers them, each knowing where it stands."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import DataError

Row = Mapping[str, Any]
"""One row: column names and values."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that may not have been parsed yet, so that whoever encodes it pays for the parsing.

    `number` counts from 1 within `origin` (a file or a hub dataset); in a file of JSON lines it is the line.
    """

    origin: str
    number: int
    content: bytes | Row

    @property
    def place(self) -> str:
        """Return where the row stands, for an error message."""
        return place(self.origin, self.number)

    def parse(self) -> Row:
        """Return the row; raises DataError naming the line that is not one JSON object."""
        if not isinstance(self.content, bytes):
            return self.content
        try:
            row = json.loads(self.content)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin}, line {self.number}: not UTF-8 text ({error.reason}).") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.origin}, line {self.number}: not valid JSON: {error.msg} at column {error.colno}. "
                "Each line must be one JSON object."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.origin}, line {self.number}: a row must be a JSON object with columns, not {describe(row)}."
            )
        return row


def place(origin: str, number: int) -> str:
    """Return where a row stands, for a message."""
    return f"{origin}, row {number}"


def describe(value: object) -> str:
    """Return the kind of a value in the words of a JSON file, with the value itself where it is short."""
    if value is None:
        return "null"
    kinds = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    kind = kinds.get(type(value), f"of type {type(value).__name__}")
    return f"{kind} ({json.dumps(value)})" if isinstance(value, bool | int | float) else kind
