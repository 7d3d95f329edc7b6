"""`finetune checkpoint`: words in, one call out; what is wrong with the words is said without torch."""

from pathlib import Path

import pytest

RUN = Path("runs/first")


@pytest.mark.parametrize(
    ("words", "place", "named"),
    [
        (("ls",), "commands.checkpoints:list_checkpoints", {"verifies": False, "as_json": False}),
        (
            ("ls", "--verify", "--json"),
            "commands.checkpoints:list_checkpoints",
            {"verifies": True, "as_json": True},
        ),
        (("show", "--step", 4), "commands.checkpoints:show_checkpoint", {"step": 4}),
        (
            ("export", "--dtype", "bfloat16", "--to", "out"),
            "commands.export:export_checkpoint",
            {"step": None, "to": Path("out"), "dtype": "bfloat16", "trust_remote_code": False, "verify": None},
        ),
    ],
)
def test_each_checkpoint_command_becomes_one_call(typed, calls, words, place, named):
    assert typed("checkpoint", words[0], RUN, *words[1:])[0] == 0
    assert calls.made == [(f"finetune.{place}", (RUN,), named)]


def test_a_run_at_a_url_is_looked_at_where_it_is_staged(typed):
    code, _, complaint = typed("checkpoint", "ls", "s3://bucket/runs/first")
    assert code == 2
    assert "/.cache/finetune/runs/first-" in complaint


@pytest.mark.parametrize(("are_good", "code"), [(True, 0), (False, 1)])
def test_verify_exits_1_when_one_is_bad(typed, calls, are_good, code):
    calls.answer = are_good
    assert typed("checkpoint", "verify", RUN)[0] == code


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("convert", RUN), "No such command 'convert'"),
        (("export", RUN, "--dtype", "float8"), "float8"),
        (("show", RUN, "--step", "last"), "--step"),
        (("ls",), "RUN"),
    ],
)
def test_invalid_checkpoint_commands_exit_with_code_2_and_call_nothing(typed, calls, words, complaint):
    code, _, said = typed("checkpoint", *words)
    assert code == 2
    assert complaint in said
    assert calls.made == []


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_that_is_not_there_is_one_message(typed, tmp_path, command):
    code, said, complaint = typed("checkpoint", command, tmp_path / "nowhere")
    assert (code, said) == (2, "")
    assert complaint.startswith(f"error: {tmp_path}/nowhere: no such folder.")


def test_listing_needs_no_torch(python, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    done = python("-X", "importtime", "-m", "finetune", "checkpoint", "ls", tmp_path)
    assert done.returncode == 0, done.stderr
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "finetune.commands.checkpoints" in modules  # it looked at something
    assert [name for name in ("torch", "numpy", "transformers") if name in modules] == []
    assert "has no checkpoints" in done.stdout
