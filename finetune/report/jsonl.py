"""events.jsonl: all events of a run, one JSON object per line."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.report.events import Event, Noted, Warned
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import format_json


class JsonlReporter:
    """Writes every event as one line with its `event` name, unix `time` and all its fields.

    The file is opened at the first event and appended to, so a resumed run continues it (a step that is taken again
    then appears twice; the later line counts). Each line is flushed. NaN and infinities, which JSON lacks, are
    written as the strings `nan`, `inf` and `-inf`. `notes` were printed before the reporter existed; they are written
    before the first event.
    """

    def __init__(self, path: Path, *, notes: Sequence[str] = (), clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._notes = notes
        self._clock = clock
        self._file: Any = None

    def __call__(self, event: Event) -> None:
        """Write the event's line."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:  # a run that was killed within a line left no newline
                if file.tell() > 0:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
            self._file = self._path.open("a", encoding="utf-8")
            for note in self._notes:
                self._write(
                    Warned(event.step, note.removeprefix("warning: "))
                    if note.startswith("warning: ")
                    else Noted(event.step, note)
                )
        self._write(event)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event) -> None:
        fields = event_fields(event, time=self._clock())
        self._file.write(format_json(fields, allow_nan=False) + "\n")
        self._file.flush()


def event_fields(event: Event, *, time: float) -> dict[str, Any]:
    """Return the event as plain JSON values, its name and time first; values that look secret are left out."""
    fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, "time": round(time, 3), **redacted_config(fields)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)
