"""Convert a file of another trainer, whose kind is detected, to a job and its other files, and list every key."""

import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.load import load_config
from finetune.errors import ConfigError, Problem, UserError
from finetune.migration.complete import complete, locate_inputs
from finetune.migration.draft import Draft, DraftEntry, Fate, KeyOutcome, PeerTrainer, nested, yaml_value
from finetune.migration.peers.axolotl import AXOLOTL
from finetune.migration.peers.llama_factory import LLAMA_FACTORY
from finetune.migration.peers.torchtune import TORCHTUNE
from finetune.migration.peers.trainer import TRAINER, TRL
from finetune.migration.source import PeerFile, read_peer_file
from finetune.runtime.text.redact import redact_known, redacted_config
from finetune.runtime.text.terminal import escape_controls, format_json

_SECTIONS = ("run", "model", "data", "task", "train", "evaluate", "checkpoint", "report", "export")
_HEADS: tuple[tuple[Fate, str], ...] = (
    ("not_possible", "Not possible here, and what to do instead:"),
    ("unknown", "Unknown keys, which were not read:"),
)
_WIDTH = 116
_SHOWN = 60


def job_text(draft: Draft, *, title: str) -> str:
    """Return the text of the job file."""
    sections = nested(draft.entries)
    lines = [*_header(draft, title)]
    for name in (*_SECTIONS, *(name for name in sections if name not in _SECTIONS)):
        if name in sections:
            lines += ["", *_lines(draft, name, sections[name], indent="")]
    return escape_controls("\n".join(lines) + "\n")


def source_of_key(draft: Draft, key: str) -> str:
    """Return `line 12: micro_batch_size: 2` for a key of the peer's file, shortened and without secrets."""
    leaf = draft.file.leaves[key]
    shown = format_json(redacted_config(leaf.value, name=key.rpartition(".")[2]), default=str)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return f"{'' if leaf.line is None else f'line {leaf.line}: '}{key}: {shown}"


def _header(draft: Draft, title: str) -> Iterator[str]:
    yield from _comment(f"Made by `finetune init --from {draft.file.path.name}` from a config of {title}.")
    if draft.notes:
        yield from ("#", "# What meant something else in that trainer:")
        for note in draft.notes:
            yield from _comment(note, bullet="- ")
    for fate, head in _HEADS:
        if keys := draft.keys_of(fate):
            yield from ("#", f"# {head}")
            for key in keys:
                yield from _comment(f"{source_of_key(draft, key)} - {draft.outcomes[key].text}", bullet="- ")
    reasons = dict.fromkeys(draft.outcomes[key].text for key in draft.keys_of("not_needed"))
    if reasons:
        yield from ("#", "# Not needed here:")
    for reason in reasons:
        keys = [key for key in draft.keys_of("not_needed") if draft.outcomes[key].text == reason]
        yield from _comment(f"{reason}: {'; '.join(source_of_key(draft, key) for key in keys)}", bullet="- ")
    mapped = [key for key in draft.keys_of("mapped") if " " in draft.outcomes[key].text]
    if mapped:
        yield from ("#", "# In other files, or sections without keys of their own:")
        for key in mapped:
            yield from _comment(f"{source_of_key(draft, key)} - {draft.outcomes[key].text}", bullet="- ")


def _comment(text: str, *, bullet: str = "") -> Iterator[str]:
    text = redact_known(" ".join(text.split()))
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"# {bullet}",
        subsequent_indent=f"# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _lines(draft: Draft, name: str, value: Any, *, indent: str) -> Iterator[str]:
    if isinstance(value, DraftEntry):
        yield f"{indent}{name}: {yaml_value(value.value)}{_origin(draft, value)}"
        return
    yield f"{indent}{name}:"
    if value and all(key.isdecimal() for key in value):
        for item in value.values():
            inner = [line for key, entry in item.items() for line in _lines(draft, key, entry, indent="")]
            yield f"{indent}  - {inner[0]}"
            yield from (f"{indent}    {line}" for line in inner[1:])
        return
    for key, entry in sorted(
        value.items(), key=lambda item: (item[0] not in ("name", "path"), isinstance(item[1], dict))
    ):
        yield from _lines(draft, key, entry, indent=f"{indent}  ")


def _origin(draft: Draft, entry: DraftEntry) -> str:
    sources = [source_of_key(draft, key) for key in entry.leaves]
    parts = [f"from {'; '.join(sources[:4])}{'; ...' if len(sources) > 4 else ''}"] if sources else []
    parts += [redact_known(entry.comment)] if entry.comment else []
    return f"  # {' - '.join(parts)}".replace("\n", " ") if parts else ""


PEERS: dict[str, PeerTrainer] = {peer.name: peer for peer in (AXOLOTL, LLAMA_FACTORY, TRL, TORCHTUNE, TRAINER)}


def detect(file: PeerFile, name: str | None = None) -> PeerTrainer:
    """Return the peer of this name, or the one that knows most keys of the file; raises UserError if none is clear."""
    if name is not None:
        if name not in PEERS:
            raise UserError(f"--peer {name}: choose one of {', '.join(PEERS)}.")
        return PEERS[name]
    patterns = {leaf.pattern for leaf in file.leaves.values()}
    keys = patterns | {key.partition(".")[0].removesuffix("[]") for key in patterns}
    keys |= {key.rpartition(".")[2] for key in patterns}
    scores = {
        peer.name: (-sum(peer.table.find(key) is None for key in patterns), len(peer.table.signs & keys))
        for peer in PEERS.values()
        if peer.table.signs & keys
    }
    likely = [name for name, score in scores.items() if score == max(scores.values())]
    if len(likely) > 1 and TRAINER.name in likely:
        likely.remove(TRAINER.name)  # the others have its keys, too
    if len(likely) != 1:
        what = f"may be one of {' or '.join(likely)}" if likely else "has no key that tells whose it is"
        raise UserError(f"--from {file.path}: the config {what}. Write --peer with one of {', '.join(PEERS)}.")
    return PEERS[likely[0]]


_MAX_REPAIRS = 6
_MISSING = "does not exist"
"""What a check reports for local files: they may come later, so no key is given up for them."""


@dataclass(frozen=True)
class Migration:
    """The result of converting a peer's file: the draft, the job's text, and the problems that its check still has."""

    title: str
    draft: Draft
    job: str
    problems: Sequence[Problem]


def migrate_file(path: Path, *, peer: str | None = None, gpus: int | None = None) -> Migration:
    """Return the job of a peer's file; raises UserError or ConfigError if the file cannot be read.

    A key that the job's check refuses is taken out and named with the check's reason.
    """
    file = read_peer_file(path)
    source = detect(file, peer)
    draft = Draft(file, gpus or 0, source)
    draft.apply(file.leaves.values())
    draft.assume(*source.table.defaults)
    source.prepare(draft)
    complete(draft)
    source.finish(draft)
    draft.write_unwritten()
    draft.default("run.folder", f"./runs/{path.stem}", "the file has no output folder")
    locate_inputs(draft)
    problems = _check(draft, source.table.title)
    for _ in range(_MAX_REPAIRS):
        refused = [problem for problem in problems if _is_given_up(draft, problem)]
        if not refused:
            break
        problems = _check(draft, source.table.title)
    if draft.out_of_scope:
        draft.note(f"the task of the file does not exist here ({draft.out_of_scope}): this job trains something else.")
    draft.require_complete()
    return Migration(source.table.title, draft, job_text(draft, title=source.table.title), problems)


def _is_given_up(draft: Draft, problem: Problem) -> bool:
    """Take a refused key out of the job and return True, unless it is a missing file or has no leaf."""
    is_section = "." not in problem.key and problem.key != "evaluate"  # which has no rows without `data.validation`
    if _MISSING in problem.message or not draft.has(problem.key) or is_section:
        return False
    if all(
        key.startswith(("data.train", "task.name", "model.name"))
        for key in draft.entries
        if key.startswith(problem.key)
    ):
        return False
    for key, entry in draft.entries.items():
        if not entry.leaves and entry.comment and f"{key}.".startswith(f"{problem.key}."):
            draft.note(f"`{key}: {yaml_value(entry.value)}`, {entry.comment}, is not possible here: {problem.message}")
    draft.withdraw(problem.key, KeyOutcome("not_possible", problem.message))
    return True


def _check(draft: Draft, title: str) -> Sequence[Problem]:
    """Return the problems of the job as it is now; a secret is one, wherever it stands."""
    problems = [
        Problem(key, "secrets do not belong in a job file. Use the storage's environment variables.")
        for key, entry in draft.entries.items()
        if isinstance(entry.value, str) and redact_known(entry.value) != entry.value
    ]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(job_text(draft, title=title), encoding="utf-8")
        try:
            load_config(job, [])
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem.key not in {one.key for one in problems}]
    return problems
