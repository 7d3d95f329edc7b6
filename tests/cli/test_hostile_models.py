"""Whatever lies in a model's folder: no code of others runs, standard input is not asked, and one message says why."""

import json
import os
import shutil

import pytest
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from finetune.cli.app import app
from tests.cli.hostile import DAMAGED, HOSTILE, canary_of, write_bad, write_good

ROWS = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n' * 2
AGREES = "y\ny\nyes\nhi\n"
"""What is piped: words that transformers would take for leave to run the code."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_good(tmp_path_factory.mktemp("hostile") / "good")


@pytest.fixture
def place(good):
    """The folder of a test, with the good model, rows and questions in it."""
    place = good.parent
    (place / "rows.jsonl").write_text(ROWS)
    (place / "asked.jsonl").write_text('{"prompt": "hi"}\n')
    yield place
    for path in place.iterdir():
        if path != good:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def job(place, name, **more):
    """Write a job that trains the model for a step, and return the words that name it."""
    rows = {"path": str(place / "rows.jsonl")}
    keys = {
        "run": {"folder": str(place / "run")},
        "model": {"name": str(name), **more.pop("model", {})},
        "data": {"train": rows, "validation": rows, "cache_folder": str(place / "cache"), "chat_template": "chatml"},
        "task": {"name": "sft"},
        "train": {"learning_rate": 1e-3, "steps": 1, "global_batch_size": 1, "microbatch_size": 1},
        "evaluate": {},
        **more,
    }
    keys["data"]["max_length"] = 200
    (place / "job.yaml").write_text(json.dumps(keys))
    return ["--config", str(place / "job.yaml")]


def distilled(place, good, teacher):
    return job(place, good, task={"name": "distillation", "distillation": {"teacher": str(teacher)}})


COMMANDS = {
    "chat": lambda place, good, bad: ["chat", str(bad), "--max-new-tokens", "2"],
    "chat with it as adapter": lambda place, good, bad: ["chat", str(good), "--adapter", f"a={bad}"],
    "generate": lambda place, good, bad: [
        *("generate", str(bad), "--input", str(place / "asked.jsonl"), "--output", str(place / "out.jsonl")),
        *("--max-new-tokens", "2"),
    ],
    "export": lambda place, good, bad: ["export", str(bad), "--dtype", "bfloat16", "--to", str(place / "exported")],
    "merge": lambda place, good, bad: ["export", str(bad), "--merge", "--to", str(place / "exported")],
    "evaluate": lambda place, good, bad: ["evaluate", str(bad), *job(place, good)],
    "check": lambda place, good, bad: ["check", job(place, bad)[1]],
    "prepare": lambda place, good, bad: ["prepare", *job(place, bad)],
    "preview": lambda place, good, bad: ["preview", *job(place, bad)],
    "plan": lambda place, good, bad: ["plan", *job(place, bad), "--gpus", "1xH100-80GB"],
    "train": lambda place, good, bad: ["train", *job(place, bad)],
    "continue": lambda place, good, bad: ["train", *job(place, good, model={"adapter": str(bad)})],
    "distil": lambda place, good, bad: ["train", *distilled(place, good, bad)],
}


NEWS = ("code of a tokenizer", "code of a config", "a pickled adapter")
KINDS = [name if name in NEWS else pytest.param(name, marks=pytest.mark.full) for name in HOSTILE]


def ends(words):
    """Type the words, agree to all that is asked, and return code and output; a traceback fails."""
    result = CliRunner().invoke(app, words, input=AGREES)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(" ".join(words)) from result.exception
    return result.exit_code, result.stderr


def forget(place):
    for name in ("run", "cache", "exported", ".out.jsonl.parts"):
        shutil.rmtree(place / name, ignore_errors=True)
    (place / "out.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize("name", KINDS)
def test_no_command_runs_code_from_a_model_folder(place, good, name):
    bad = write_bad(place / "folder", good=good, change=HOSTILE[name])
    codes = {}
    for command, words in COMMANDS.items():
        codes[command], said = ends(words(place, good, bad))
        assert not canary_of(bad).exists(), f"{command}: code of the folder has run"
        assert codes[command] in (0, 2), f"{command}: {said}"
        assert said.count("error: ") == (codes[command] == 2), f"{command}: {said}"
        assert "[y/N]" not in said, f"{command}: it was asked"
        forget(place)
    assert set(codes) == set(COMMANDS) and 2 in codes.values()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_folder_is_reported_with_the_file(place, good, name):
    change, named = DAMAGED[name]
    bad = write_bad(place / "folder", good=good, change=change)
    code, said = ends(COMMANDS["chat"](place, good, bad))
    assert (code, said.count("error: ")) == (2, 1), said
    assert named in said and "out of reach" not in said, said
    is_adapter = (bad / "adapter_config.json").exists()
    if name.startswith(("a ", "an ", "no ")) and "beams" not in name and not is_adapter:
        code, said = ends(COMMANDS["train"](place, good, bad))
        assert (code, said.count("error: ")) == (2, 1), said


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_plan_refuses_a_fifo_in_a_model_folder_at_once(place, good, name):
    bad = write_bad(place / "folder", good=good, change=lambda folder: (folder / name).unlink())
    os.mkfifo(bad / name)
    code, said = ends(COMMANDS["plan"](place, good, bad))
    assert (code, said.count("error: ")) == (2, 1), said
    assert f"{name}: it is a FIFO, not a regular file" in said


@pytest.mark.parametrize("command", ["evaluate", "prepare", "preview"])
def test_a_tokenizer_whose_rule_would_panic_is_reported_with_the_file(place, good, command, capfd):
    bad = write_bad(place / "folder", good=good, change=insert_at_word_boundaries)
    code, said = ends(COMMANDS[command](place, good, bad))
    assert (code, said.count("error: ")) == (2, 1), said
    assert "tokenizer.json is damaged: a rule of its normalizer matches the empty text" in said
    assert "panicked" not in capfd.readouterr().err  # Rust prints to the descriptor


def insert_at_word_boundaries(folder):
    path = folder / "tokenizer.json"
    rule = {"type": "Replace", "pattern": {"Regex": r"\b"}, "content": "x"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": rule}))


def test_code_that_is_trusted_runs(place, good, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place / "modules"))
    bad = write_bad(place / "folder", good=good, change=HOSTILE["code of a tokenizer"])
    code, said = ends(["chat", str(bad), "--max-new-tokens", "2"])
    assert code == 2 and "--trust-remote-code" in said and "model.trust_remote_code: true" in said
    assert ends(["chat", str(bad), "--max-new-tokens", "2", "--trust-remote-code"])[0] == 0
    assert canary_of(bad).exists()
    canary_of(bad).unlink()
    assert ends(["prepare", *job(place, bad, model={"trust_remote_code": True})])[0] == 0


def test_trusted_pickles_hold_tensors_and_nothing_else(place, good):
    bad = write_bad(place / "folder", good=good, change=HOSTILE["pickled weights"])
    code, said = ends(["chat", str(bad), "--trust-remote-code"])
    assert code == 2 and "weights_only" in said.lower().replace(" ", "_"), said
    assert not canary_of(bad).exists()
