"""A case: a small healthy project of a user, what is wrong in it, and the command that meets it.

The property that every case must keep is one sentence: exit code 0 or 2, one message, under 5 s and 500 MB, nothing
written outside the run folder and the cache, no code of others run.
"""

import base64
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.fuzz.forked import Outcome, Server
from tests.small_job import reversal, write_rows

MAX_SECONDS = 5.0
MAX_BYTES = 500 << 20
KILLED_AFTER_SECONDS = 40.0
WRITABLE = ("runs", "cache", "tmp", "out")
"""Of the case's folder: its runs, its cache, the temporary folder, and what the command is told to write."""

HARMLESS_PROGRAMS = ("git", "uname", "nvidia-smi", "gcc", "ldconfig")
"""Asked by us or by libraries while they look around; none of them comes from a case."""

MODEL = "runs/job/final/model.safetensors"
OWN_WORKERS = ("finetune.data.streams.windows", "torch.cuda.device_count()")
"""What prepares the rows of a stream; what counts GPUs for a sweep."""

STARTING_SECONDS = 15.0
"""For the fresh interpreter in which a stream's rows are prepared, or a sweep counts the GPUs: both import torch."""

CANARY = "CANARY"
CODE = f"import pathlib\npathlib.Path({CANARY!r}).write_text('code of others has run')\n"
"""Python which a hostile folder would like to have run: it leaves a file."""

JOB = """\
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {name: ./tokenizer}
data:
  train: {path: train.jsonl}
  validation: {path: held_out.jsonl}
  max_length: 128
  over_length: drop
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train:
  global_batch_size: 4
  microbatch_size: 4
  steps: 4
  learning_rate: 1e-2
checkpoint: {every_steps: 2}
evaluate: {}
report: {console: plain, log_every_steps: 1}
"""

Change = str | bytes | None
"""What takes a file's place: text, bytes, or nothing at all. A text `-> PATH` is a link, `/` a folder."""


@dataclass(frozen=True)
class Case:
    """A command, what is typed to it, and the files that differ from those of the healthy project."""

    words: tuple[str, ...]
    files: Mapping[str, Change] = field(default_factory=dict)
    stdin: bytes = b""
    same_model: bool = False  # a run that ends well has trained the very model that the healthy project has

    @property
    def needs_torch(self) -> bool:
        """Tell whether the command imports torch: it is then run by the server that has."""
        return self.words[:1] != ("check",)

    def to_json(self) -> str:
        """Return the case as text."""
        files = {path: _encoded(change) for path, change in self.files.items()}
        return json.dumps({**asdict(self), "files": files, "stdin": _encoded(self.stdin)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the case that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        files = {path: _decoded(change) for path, change in values["files"].items()}
        stdin = _decoded(values["stdin"]) or b""
        return cls(tuple(values["words"]), files, stdin, values["same_model"])  # type: ignore[arg-type]


def _encoded(change: Change) -> Any:
    return {"base64": base64.b64encode(change).decode()} if isinstance(change, bytes) else change


def _decoded(change: Any) -> Change:
    return base64.b64decode(change["base64"]) if isinstance(change, dict) else change


class Ground:
    """The healthy project, made once by a real run, and the two servers that run cases on copies of it."""

    def __init__(self, folder: Path, *, plain: Server, with_torch: Server) -> None:
        self._place = folder / "project"  # of every case: a run's files name the folder in which they were written
        self._healthy = folder / "healthy"
        self._servers = {False: plain, True: with_torch}
        self._place.mkdir(parents=True)
        _make_project(self._place, with_torch)
        shutil.copytree(self._place, self._healthy, symlinks=True)

    def files(self, *parts: str) -> list[str]:
        """Return the project's files under one of its folders, sorted."""
        inner = self._healthy.joinpath(*parts)
        return sorted(str(path.relative_to(self._healthy)) for path in inner.rglob("*") if path.is_file())

    def read(self, path: str) -> bytes:
        """Return the content of a healthy file."""
        return (self._healthy / path).read_bytes()

    def left_by(self, words: tuple[str, ...], folder: str, names: tuple[str, ...]) -> dict[str, bytes]:
        """Run a command on the healthy project and return the files of those names that it leaves in a folder."""
        home = self._prepare(Case(words))
        outcome = self._servers[True].run(words, folder=home, limit_seconds=300)
        assert outcome.code == 0, outcome.stdout + outcome.stderr
        paths = sorted(path for name in names for path in (home / folder).rglob(name) if path.is_file())
        return {str(path.relative_to(home)): path.read_bytes() for path in paths}

    def violation(self, case: Case) -> str | None:
        """Run the case and return how it breaks the property, with what it printed; None where it keeps it."""
        folder = self._prepare(case)
        before = _listing(folder)
        server = self._servers[case.needs_torch]
        outcome = server.run(case.words, folder=folder, stdin=case.stdin, limit_seconds=KILLED_AFTER_SECONDS)
        wrong = _wrong(outcome, case, folder=folder, before=before)
        if wrong is None and case.same_model and outcome.code == 0:
            wrong = self._other_model(folder)
        if wrong is None:
            return None
        return f"{wrong}\n$ finetune {' '.join(case.words)}\n{outcome.stdout[-1500:]}\n{outcome.stderr[-3000:]}"

    def outcome(self, words: tuple[str, ...], *, surroundings: str) -> Outcome:
        """Return what a command comes to on the healthy project, in surroundings that are not."""
        case = Case(words)
        folder = self._prepare(case)
        server = self._servers[case.needs_torch]
        return server.run(words, folder=folder, limit_seconds=KILLED_AFTER_SECONDS, surroundings=surroundings)

    def _other_model(self, folder: Path) -> str | None:
        """Return what differs where a run has left another model than the healthy project's."""
        good = self.read(MODEL)
        found = [path for path in folder.glob("runs/*/final/model.safetensors") if path.read_bytes() != good]
        return f"trained another model: {', '.join(map(str, found))}" if found else None

    def _prepare(self, case: Case) -> Path:
        shutil.rmtree(self._place)
        self._place.mkdir()
        whole = ("tokenizer", "runs", "adapter", "cache") if case.needs_torch else ("tokenizer",)
        for path in self._healthy.iterdir():
            if path.is_file():
                shutil.copy(path, self._place)
            elif path.name in whole:
                shutil.copytree(path, self._place / path.name, symlinks=True)
        (self._place / "tmp").mkdir()
        for relative, change in case.files.items():
            _put(self._place / relative, change)
        return self._place


def _put(path: Path, change: Change) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if change is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif change == "/":
        path.mkdir()
    elif change.startswith("-> "):
        path.symlink_to(change.removeprefix("-> "))
    else:
        path.write_bytes(change.encode("utf-8", errors="surrogatepass"))


def _wrong(outcome: Outcome, case: Case, *, folder: Path, before: set[str]) -> str | None:
    """Return the first half of the property's sentence that does not hold."""
    if outcome.code is None:
        return f"did not end within {KILLED_AFTER_SECONDS:.0f} s"
    says_no = case.words[:2] == ("checkpoint", "verify") or case.words[0] == "plan"  # exit code 1: bad, nothing fits
    if outcome.code not in ((0, 1, 2) if says_no else (0, 2)):
        return f"exit code {outcome.code}"
    if "Traceback (most recent call last)" in outcome.stdout + outcome.stderr or "panicked at" in outcome.stderr:
        return "a traceback"
    if outcome.code == 2 and ("error: " not in outcome.stderr.lower() or len(outcome.stderr) > 20_000):
        return f"exit code 2 with no message, or one of {len(outcome.stderr):,} characters"
    starts_interpreter = case.words[0] == "sweep" or "stream: " in " ".join(case.words)
    max_seconds = MAX_SECONDS + (STARTING_SECONDS if starts_interpreter else 0.0)
    if min(outcome.seconds, outcome.cpu_seconds) > max_seconds:  # the machine may be busy with something else
        return f"took {outcome.seconds:.1f} s"
    if (outcome.grown_bytes if case.needs_torch else outcome.peak_bytes) > MAX_BYTES:
        return f"grew by {outcome.grown_bytes / 1e6:,.0f} MB to {outcome.peak_bytes / 1e6:,.0f} MB"
    if outcome.left_running:
        return "left a process running"
    if any(letter in outcome.stdout + outcome.stderr for letter in ("\x1b", "\x9b", "\x07", "\x08")):
        return "printed a terminal's control characters"
    return _intruded(outcome, folder=folder, before=before) or _marked_up(folder)


class _Elements(HTMLParser):
    """Collects the elements of a page as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.found += [
            f"{name}={value}" for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")
        ]


def _marked_up(folder: Path) -> str | None:
    """Return the page whose texts have become elements."""
    for page in filter(Path.is_file, folder.rglob("*.html")):
        elements = _Elements()
        elements.feed(page.read_text(encoding="utf-8", errors="replace"))
        if wrong := [each for each in elements.found if each == "pwned" or each.startswith(("on", "a script"))]:
            return f"{page.name} has the element {wrong[0]}"
    return None


def _intruded(outcome: Outcome, *, folder: Path, before: set[str]) -> str | None:
    """Return what was written where nothing is to be written, or the code that was run."""
    if (folder / CANARY).exists() or any(Path(name).name == CANARY for name in _listing(folder)):
        return "code of others has run"
    new = _listing(folder) - before
    outside = sorted(name for name in new if name.split("/")[0] not in WRITABLE)
    if outside:
        return f"wrote {', '.join(outside[:5])}"
    allowed = (*(f"{folder}/{part}" for part in WRITABLE), "/dev/", "/proc/self", "/tmp/torch", "/root/.triton")
    for event, text in outcome.acts:
        if event in ("exec", "pickle.find_class"):
            return f"{event} {text}"
        if event.startswith(("subprocess", "os.system", "os.exec", "os.posix_spawn")):
            is_ours = text.startswith(f"('{sys.executable}'") and any(worker in text for worker in OWN_WORKERS)
            if not is_ours and not any(f"'{name}'" in text or f"/{name}'" in text for name in HARMLESS_PROGRAMS):
                return f"started {text}"
        elif Path(text) not in (folder, *folder.parents) and not text.startswith(allowed):
            # These folders themselves: whether they could be written, as `run.folder: ..` needs.
            return f"{event} {text}"
    return None


def _listing(folder: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(root, name), folder)  # noqa: PTH118 - names may be anything
        for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def _make_project(folder: Path, server: Server) -> None:
    """Write the job and its rows, train a tokenizer, and run the job in full and with LoRA: two real runs."""
    chance = random.Random(1)
    for name, count in (("train.jsonl", 24), ("held_out.jsonl", 4)):
        write_rows(folder / name, (reversal(chance) for _ in range(count)))
    (folder / "job.yaml").write_text(JOB)
    (folder / "tmp").mkdir()
    trains = ["--set", "model.tokenizer={train: {vocabulary_size: 320}}", "--set", "run.folder=runs/first"]
    _must(server, ["train", "--config", "job.yaml", *trains], folder)
    shutil.copytree(folder / "runs" / "first" / "inputs", folder / "tokenizer")
    shutil.rmtree(folder / "runs" / "first")
    _must(server, ["train", "--config", "job.yaml"], folder)
    lora = ["--set", "model={name: ./runs/job/final, lora: {rank: 2, alpha: 4.0}}", "--set", "run.folder=runs/lora"]
    _must(server, ["train", "--config", "job.yaml", *lora], folder)
    shutil.move(folder / "runs" / "lora" / "final", folder / "adapter")
    shutil.rmtree(folder / "runs" / "lora")
    shutil.copytree(
        folder / "runs" / "job", folder / "runs" / "other", ignore=shutil.ignore_patterns("final", "step-*")
    )
    (folder / "prompts.jsonl").write_text('{"prompt": "reverse: red blue"}\n')


def _must(server: Server, words: list[str], folder: Path) -> None:
    outcome = server.run(words, folder=folder, limit_seconds=300)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
