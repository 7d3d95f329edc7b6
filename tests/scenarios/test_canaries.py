"""Every command is given secrets and escape sequences in every place; none is printed, and none is written down."""

import contextlib
import http.server
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from finetune.__main__ import main
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.supervision import exit
from finetune.runtime.text.redact import collect_environment_secrets
from tests.scenarios.trained import forget

CANARIES = {
    "signature": "c0ffee11Ab+signature/Qq==",
    "sas": "c0ffee22AbSharedAccess%2Bq%3D",
    "password": "c0ffee33AbPassword",
    "storage key": "c0ffee44AbStorageKey",
    "SLURM_JWT": "c0ffee55.Ab-jwt",
    "HF_TOKEN": "hf_c0ffee66AbHuggingFaceToken00000",
    "WANDB_API_KEY": "c0ffee77abcdefc0ffee77abcdefc0ffee77abcd",
    "AWS_SECRET_ACCESS_KEY": "c0ffee88Ab/aws+secret/key",
    "AWS_ACCESS_KEY_ID": "AKIAC0FFEE99ABCDEFGH",
    "in a variable": "c0ffee00AbVariable",
    "override": "c0ffeebbAbOverride",
    "comment": "c0ffeeccAbProject",
    "repository": "hf_c0ffeeddAbRepositoryName0000000",
}
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\u200b\ud800-\udfff\U000e0000-\U000e007f]")
EVIL = "\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e\u200b\r\x08"

VARIABLES = {
    **{name: CANARIES[name] for name in CANARIES if name.isupper()},
    "ACCELERATE_CANARY": f"--launch --hub-token {CANARIES['in a variable']}",
    "HF_HUB_OFFLINE": "1",
}

JOB = """
run: {folder: "runs/evil\\e]0;evil\\a\\u202E", seed: 7}
model:
  from_config:
    model_type: llama
    values: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
      num_key_value_heads: 2}
  tokenizer: {train: {vocabulary_size: 300}}
data:
  train: {path: "ADDRESS/train.jsonl?X-Amz-Date=DATE&X-Amz-Signature=SIGNATURE"}
  validation: {path: "ADDRESS/held_out.jsonl?sv=2024&sig=SAS"}
  max_length: 256
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 4, steps: 2, learning_rate: 1e-2}
checkpoint: {every_steps: 1}
evaluate: {every_steps: 1, generate: {num_samples: 2, max_new_tokens: 4, show: 2, metrics: [exact_match]}}
report: {console: plain, log_every_steps: 1}  # token=PROJECT
export: {push_to_hub: "me/REPOSITORY"}
"""


@dataclass
class Session:
    """What was typed, and what came of it."""

    folder: Path
    job: Path
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return next((self.folder / "runs").glob("evil*"))

    def type(self, name: str, *words: object, lines: str = "") -> None:
        """Run the command in this process; its output goes through streams that know bytes only, as a pipe does."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            patch.setattr(sys, "argv", ["finetune", *map(str, words)])
            patch.setattr(sys, "stdin", io.StringIO(lines))
            patch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's collects them
            main()
        forget()
        self.codes[name] = int(ended.value.code or 0)
        self.said[name] = b"".join(each.buffer.getvalue() for each in (out, err)).decode()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Every command, one after the other, on one job."""
    folder = tmp_path_factory.mktemp("canaries")
    rows = [_row(f"{n} {EVIL}", f"{n * n}{EVIL}") for n in range(12)]
    for name, some in (("train", rows), ("held_out", rows[:2]), ("bad", [*rows, {"messages": f"{EVIL} no turns"}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    with pytest.MonkeyPatch.context() as patch, _served(folder) as address:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr(exit, "exit_now", sys.exit)
        session = Session(folder, folder / "jo\x9bb.yaml")
        _write_job(session.job, address, date="20260101")
        _train_and_look(session, address, patch)
        _serve_the_model(session, patch)
        _fail(session, address, patch)
        yield session
    collect_environment_secrets()


def _train_and_look(session: Session, address: str, patch: pytest.MonkeyPatch) -> None:
    job = session.job
    session.type("check", "check", job)
    session.type("prepare", "prepare", "--config", job)
    session.type("preview", "preview", "--config", job, "--rows", 2)
    session.type("train", "train", "--config", job, "--set", "train.stop_after_steps=1")
    _write_job(job, address, date="20270707")
    session.type("resume", "train", "--config", job)
    session.type("train again", "train", "--config", job)
    for words in ("ls", "ls --json", "show", "verify", "prune --keep-last 1"):
        command, *options = words.split()
        session.type(f"checkpoint {words}", "checkpoint", command, session.run, *options)
    session.type("evaluate by a job", "evaluate", session.run, "--config", job)
    session.type("evaluate", "evaluate", session.run)
    session.type("doctor", "doctor", "--config", job)


def _serve_the_model(session: Session, patch: pytest.MonkeyPatch) -> None:
    exported, prompts = session.folder / "exported", session.folder / "held_out.jsonl"
    push = ("--push-to-hub", f"me/{CANARIES['repository']}")
    session.type("export", "export", session.run, "--to", exported, *push)
    answers = session.folder / "answers.jsonl"
    session.type("generate", "generate", exported, "--input", prompts, "--output", answers, "--max-new-tokens", 2)
    with patch.context() as evil:
        evil.setattr("finetune.commands.chat.generate_batch", _answer_evil)
        session.type("chat", "chat", exported, lines=f"hi\n/adapter {EVIL[:5]}\n")


def _fail(session: Session, address: str, patch: pytest.MonkeyPatch) -> None:
    job, train = session.job, ("train", "--config", session.job, "--set", f"run.folder={session.folder}/runs/failed")
    secret = quote(CANARIES["signature"], safe="")
    session.type("no such option", "train", f"--{EVIL}")
    session.type("no such file", "check", f"{EVIL}.yaml")
    session.type("key in the file", "check", job, "--set", f"report.api_key={CANARIES['override']}")
    session.type("key in the address", "check", job, *_set("data.train.path", f"s3://AKIA:{_in_storage()}@b/x.jsonl"))
    session.type("evil value", "check", job, "--set", 'data.over_length="a\\e[31m\\u202E"', "--set", f"a{EVIL}=1")
    gone = f"{address}/gone.jsonl?token={secret}"
    session.type("address that is gone", *train, *_set("data.train.path", gone))
    session.type(
        "closed address",
        *train,
        *_set("data.train.path", f"http://127.0.0.1:{free_loopback_port()}/a.jsonl?sig={secret}"),
    )
    session.type("password", *train, *_set("data.train.path", f"https://me:{CANARIES['password']}@h/x.jsonl"))
    bad = f"{address}/bad.jsonl?sig={secret}"
    session.type("bad row", *train, *_set("data.train.path", bad))
    with patch.context() as fault:
        fault.setattr("finetune.run.train.build", partial(_fail_badly, gone))
        session.type("fault of ours", *train)


def _set(key: str, value: str) -> tuple[str, str]:
    return "--set", f'{key}="{value}"'


def _in_storage() -> str:
    return CANARIES["storage key"]


def _answer_evil(*_, streamer, **__):
    """Answer with an escape sequence that is cut in two."""
    for piece in ("a\x1b", "]52;c;ZXZpbA==\x07", "\x9b31m\u202e\n"):
        streamer.on_finalized_text(piece)
    return [torch.tensor([5, 6])]


def _fail_badly(address: str, *_, **__):
    """Raise what nobody expects, with secrets in the error, in its cause and in a thread."""
    thread = threading.Thread(target=_raise, args=(f"in a thread {EVIL} {CANARIES['HF_TOKEN']}",))
    thread.start()
    thread.join()
    try:
        _raise(f"got {CANARIES['WANDB_API_KEY']} {EVIL}")
    except RuntimeError as error:
        raise KeyError(f"403 for {address}") from error


def _raise(message: str) -> None:
    raise RuntimeError(message)


def _row(asked: str, answered: str) -> dict:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _write_job(path: Path, address: str, *, date: str) -> None:
    text = JOB.replace("ADDRESS", address).replace("DATE", date).replace("SAS", CANARIES["sas"])
    text = text.replace("SIGNATURE", quote(CANARIES["signature"], safe="")).replace("PROJECT", CANARIES["comment"])
    path.write_text(text.replace("REPOSITORY", CANARIES["repository"]), encoding="utf-8")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _cores(canary: str) -> set[str]:
    """The canary's first characters: nothing of it is left over, however it is quoted."""
    return {canary[:12], canary[3:14]} if canary.startswith("hf_") else {canary[:8]}


def test_every_command_of_the_canary_session_exits_as_expected(session):
    refused = {"evaluate", "chat", "no such option", "no such file", "key in the file", "key in the address"}
    refused |= {"evil value", "address that is gone", "closed address", "password", "bad row"}
    codes = dict.fromkeys(session.codes, 0) | dict.fromkeys(refused, 2)
    codes |= {"fault of ours": 1, "export": 1}  # it is exported, and the hub is out of reach
    wrong = {name: (code, session.said[name]) for name, code in session.codes.items() if code != codes[name]}
    assert wrong == {}
    assert len(codes) > 25


def test_a_run_resumes_with_a_new_url_signature(session):
    assert "resumes from" in session.said["resume"]
    assert "changed since the checkpoint: train.stop_after_steps 1 -> null\n" in session.said["resume"]


def test_nothing_printed_holds_a_secret(session):
    for name, said in session.said.items():
        for what, canary in CANARIES.items():
            for core in _cores(canary):
                assert core not in said, f"{name} tells the {what}: {said}"


def test_nothing_written_down_holds_a_secret(session):
    folders = [session.folder / "runs", session.folder / "cache", session.folder / "exported"]
    written = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"config.yaml", "resolved.yaml", "environment.json", "events.jsonl", "status.json", "audit.json"} <= names
    assert {"final.json", "manifest.json", "counts.json", "README.md"} <= names
    for path in written:
        content = path.read_bytes()
        for what, canary in CANARIES.items():
            for core in _cores(canary):
                assert core.encode() not in content, f"{path} holds the {what}"


def test_nothing_printed_acts_on_a_terminal(session):
    for name, said in session.said.items():
        found = ACTING.search(said)
        assert found is None, f"{name}: {said[max(0, found.start() - 60) : found.end() + 20]!r}"
    assert "\\x1b]52;c;ZXZpbA==\\x07\\x9b31m\\u202e" in session.said["chat"]
    assert "jo\\x9bb.yaml" in session.said["check"]


def test_files_in_the_run_folder_contain_no_control_sequences(session):
    for name in (
        "resolved.yaml",
        "environment.json",
        "events.jsonl",
        "status.json",
        "audit.json",
        "final.json",
        "final/README.md",
    ):
        text = (session.run / name).read_text(encoding="utf-8")
        assert ACTING.search(text) is None, name


def test_the_copy_of_the_job_reports_redacted_values(session):
    text = (session.run / "config.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[-1].startswith("# As written, except for values that look like secrets")
    assert "X-Amz-Signature=[redacted]" in text
    assert text.splitlines()[:2] == JOB.splitlines()[:2]  # lines are where resolved.yaml says


def test_a_saved_job_with_a_redacted_url_is_rejected_with_a_remedy(session):
    assert "the secret in this URL was removed from the saved job. Pass the URL again" in session.said["evaluate"]


def test_a_fault_of_ours_keeps_its_traceback(session):
    said = session.said["fault of ours"]
    assert "Traceback (most recent call last)" in said
    assert "The above exception was the direct cause of the following exception" in said
    assert "RuntimeError: got [redacted] \\x1b]52" in said
    assert "gone.jsonl?token=[redacted]" in said
    assert "RuntimeError: in a thread \\x1b]52" in said
    status = json.loads((session.folder / "runs/failed/status.json").read_text())
    assert status["state"] == "failed"
    assert "gone.jsonl?token=[redacted]" in status["error"]["message"]


def test_launch_arguments_are_recorded_without_secrets(session):
    environment = json.loads((session.run / "environment.json").read_text(encoding="utf-8"))
    assert environment["launcher"]["SLURM_JWT"] == "[redacted]"
    assert environment["launcher"]["ACCELERATE_CANARY"] == "--launch --hub-token [redacted]"
    assert environment["launcher"]["HF_HUB_OFFLINE"] == "1"
