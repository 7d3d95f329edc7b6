"""What a fresh process prints goes through whatever pipe there is, and is read as it was meant."""

import json
import os
import subprocess
import sys

import pytest

from finetune.runtime.text.terminal import format_json

NAME = b"f\xc3\xbcr\xff\x1b[31m\xe2\x80\xae.yaml"


@pytest.mark.parametrize("encoding", ["ascii:strict", "utf-8:strict"])
def test_a_name_that_no_encoding_knows_is_printed(encoding, tmp_path):
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"finetune", b"check", NAME],
        env={**os.environ, **variables},
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: f")
    assert b".yaml has 1 problem\n" in done.stderr
    assert b"\\udcff\\x1b[31m" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_fault_of_ours_ends_with_its_traceback_and_exit_code_1(typed, job, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("\x1b[2J at https://h/?token=c0ffee")

    monkeypatch.setattr("finetune.commands.check.check", fail)
    code, said, told = typed("check", job)
    assert (code, said) == (1, "")
    assert told.startswith("Traceback (most recent call last):\n")
    assert told.endswith("ZeroDivisionError: \\x1b[2J at https://h/?token=[redacted]\n")


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            SystemExit("\x1b[2J https://h/?token=c0ffee"),
            "with exit code '\\x1b[2J https://h/?token=[redacted]' before the command was done. Remove the exit; "
            "a callback ends a run with `Request.STOP`.\n",
        ),
        (BaseException("\x1b[2J https://h/?token=c0ffee"), "\\x1b[2J https://h/?token=[redacted]\n"),
    ],
)
def test_any_error_that_ends_the_process_is_printed_escaped_and_redacted(typed, job, monkeypatch, error, end):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("finetune.commands.check.check", fail)
    code, _, told = typed("check", job)
    assert code == 1
    assert told.endswith(end)


def test_recorded_command_line_arguments_have_their_secrets_redacted(typed, job):
    typed("check", job, "--set", "report.api_key=c0ffee", "--set", "data.train.path=https://h/x?sig=c0ffee")
    assert sys.argv[1:] == [
        *("check", str(job), "--set", "report.api_key=[redacted]"),
        *("--set", "data.train.path=https://h/x?sig=[redacted]"),
    ]


def test_json_on_the_screen_is_json(typed, monkeypatch):
    value = {"name": "a\x9b\u202e\x1b", "path": "ü"}
    monkeypatch.setattr("finetune.commands.checkpoints.list_checkpoints", lambda *_, **__: print_json(value))
    code, said, _ = typed("checkpoint", "ls", "run", "--json")
    assert code == 0
    assert json.loads(said) == value
    assert "\\u009b\\u202e\\u001b" in said


def print_json(value: object) -> None:
    print(format_json(value))
