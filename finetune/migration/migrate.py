"""Convert a file of another trainer, whose kind is detected, to a job and its other files, and list every key."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.load import load_config
from finetune.errors import ConfigError, Problem, UserError
from finetune.migration.complete import complete
from finetune.migration.draft import Draft, Outcome
from finetune.migration.peers.axolotl import AXOLOTL
from finetune.migration.peers.llama_factory import LLAMA_FACTORY
from finetune.migration.peers.ms_swift import MS_SWIFT
from finetune.migration.peers.peer import Peer
from finetune.migration.peers.torchtune import TORCHTUNE
from finetune.migration.peers.trainer import TRAINER
from finetune.migration.peers.trl import TRL
from finetune.migration.rules import QAT
from finetune.migration.source import PeerFile, read_peer_file
from finetune.migration.write import job_text

PEERS: dict[str, Peer] = {peer.name: peer for peer in (AXOLOTL, LLAMA_FACTORY, TRL, MS_SWIFT, TORCHTUNE, TRAINER)}


def detect(file: PeerFile, name: str | None = None) -> Peer:
    """Return the peer of this name, or the one whose signs the file has most of; raises UserError if none is clear."""
    if name is not None:
        if name.lower().replace("-", "_") not in PEERS:
            raise UserError(f"--peer {name}: choose one of {', '.join(PEERS)}.")
        return PEERS[name.lower().replace("-", "_")]
    keys = {leaf.pattern for leaf in file.leaves.values()}
    keys |= {part for key in keys for part in (key.partition(".")[0].removesuffix("[]"), key.rpartition(".")[2])}
    counts = {peer.name: len(peer.signs & keys) for peer in PEERS.values()}
    best = max(counts.values())
    likely = [peer for peer, count in counts.items() if count == best]
    if len(likely) > 1 and TRAINER.name in likely:
        likely.remove(TRAINER.name)  # the others have its keys, too
    if best == 0 or len(likely) > 1:
        what = f"may be one of {' or '.join(likely)}" if best else "has no key that tells whose it is"
        raise UserError(f"--from {file.path}: the config {what}. Write --peer with one of {', '.join(PEERS)}.")
    return PEERS[likely[0]]


_MAX_REPAIRS = 6
_MISSING = "does not exist"
"""What a check reports for local files: they may come later, so no key is given up for them."""


@dataclass(frozen=True)
class Migration:
    """What was made of a peer's file: the draft, the job's text, and the problems that its check still has."""

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
    draft = Draft(file, gpus or 0)
    draft.apply(source.table)
    source.prepare(draft)
    complete(draft)
    source.finish(draft)
    draft.default("run.folder", f"./runs/{path.stem}", "no output folder there")
    problems = _check(draft, source.title)
    for _ in range(_MAX_REPAIRS):
        refused = [problem for problem in problems if _is_given_up(draft, problem)]
        if not refused:
            break
        problems = _check(draft, source.title)
    if not draft.out_of_scope and any(draft.outcomes[key].text == QAT for key in draft.keys_of("not_possible")):
        draft.out_of_scope = "quantization-aware training"
    if draft.out_of_scope:
        draft.note(f"the task of the file does not exist here ({draft.out_of_scope}): this job trains something else.")
    draft.require_complete()
    return Migration(source.title, draft, job_text(draft, title=source.title), problems)


def _is_given_up(draft: Draft, problem: Problem) -> bool:
    """Take a refused key out of the job and return True, unless it is a missing file or has no leaf."""
    if _MISSING in problem.message or not draft.has(problem.key) or "." not in problem.key:
        return False
    if all(
        key.startswith(("data.train", "task.name", "model.name"))
        for key in draft.entries
        if key.startswith(problem.key)
    ):
        return False
    draft.withdraw(problem.key, Outcome("not_possible", problem.message))
    return True


def _check(draft: Draft, title: str) -> Sequence[Problem]:
    """Return the problems of the job as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(job_text(draft, title=title), encoding="utf-8")
        for name, text in draft.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        try:
            load_config(job, [])
        except ConfigError as error:
            return error.problems
    return ()
