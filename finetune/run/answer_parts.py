"""Answers on their way: a hidden folder beside the output, a file for each rank, until all of them are there."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.rows import Row
from finetune.errors import UserError
from finetune.runtime import files, ranks
from finetune.runtime.json_files import read_json
from finetune.runtime.redact import redacted_config
from finetune.runtime.terminal import json_text

ANSWER = "answer"


@dataclass(frozen=True)
class AnswerParts:
    """Answers that are there already, in a hidden folder beside the output, a file for each rank."""

    output: Path
    folder: Path

    @classmethod
    def open(cls, output: Path, about: Any) -> "AnswerParts":
        """Return the parts of this very question; raises UserError where others lie there. Collective."""
        parts = cls(output, output.with_name(f".{output.name}.parts"))
        note = parts.folder / "about.json"
        if ranks.is_main() and not note.is_file():
            files.write_json(note, about)
        ranks.barrier()
        if _about(note) != redacted_config(about):
            raise UserError(
                f"{parts.folder} holds answers of an earlier start with another model, input or other settings. Delete "
                "it to begin anew, or name another --output."
            )
        return parts

    def answered(self) -> set[int]:
        """Return the numbers of the rows that have an answer. Collective."""
        found = {number for number, _ in self._all()}
        ranks.barrier()  # nobody writes before all have looked: the shares must be cut alike
        return found

    def keep(self, number: int, text: str) -> None:
        """Write one answer down; it begins a line of its own, also behind one that a killed process has torn."""
        with (self.folder / f"rank-{ranks.rank():05d}.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"row": number, ANSWER: text}) + "\n")

    def join(self, rows: Sequence[Row]) -> None:
        """Write the output whole, and remove the parts. On one process."""
        answers = dict(self._all())
        lines = (json_text({**row, ANSWER: answers[n]}, default=str) for n, row in enumerate(rows))
        files.write_text(self.output, "".join(f"{line}\n" for line in lines))
        shutil.rmtree(self.folder)

    def _all(self) -> Iterator[tuple[int, str]]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in files.read_json_lines(path):
                if isinstance(line, dict) and isinstance(line.get("row"), int) and isinstance(line.get(ANSWER), str):
                    yield line["row"], line[ANSWER]


def _about(note: Path) -> Any:
    try:
        return read_json(note)
    except (OSError, ValueError):
        return None
