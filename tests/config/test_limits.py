"""What a stranger may write into a job file: each is answered at once, by one message that says what to do."""

import os
import threading
import time

import pytest

from finetune.config.load import load_config, load_resolved
from finetune.config.yaml import MAX_DEPTH, MAX_FILE_BYTES, MAX_LISTED, MAX_VALUES, read_yaml
from finetune.errors import ConfigError, UserError
from tests.refusals import refused

SECONDS = 5.0
DEEP = 500


def bomb(levels: int) -> str:
    """Return a text of a few hundred characters that means 9 to the power of `levels` values."""
    lines = [f"a{n}: &a{n} [{','.join(['1' if n == 0 else f'*a{n - 1}'] * 9)}]" for n in range(levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"x: {'[' * DEEP}{']' * DEEP}\n", f"nested deeper than {MAX_DEPTH} levels"),
        (f"x: {'{a: ' * DEEP}1{'}' * DEEP}\n", f"nested deeper than {MAX_DEPTH} levels"),
        (f"x:\n  {'- ' * DEEP}b\n", f"nested deeper than {MAX_DEPTH} levels"),
        (f"x: {'[' * 30_000}", f"nested deeper than {MAX_DEPTH} levels"),
        (f"? {'[' * DEEP}{']' * DEEP}\n: 1\n", f"nested deeper than {MAX_DEPTH} levels"),
        (bomb(9), f"more than {MAX_VALUES:,} keys and values"),
        (f"x: [{','.join(['1'] * 100_000)}]\n", f"more than {MAX_VALUES:,} keys and values"),
        ("x: &x '" + "y" * 20_000 + "'\nz: [" + ",".join(["*x"] * 20_000) + "]\n", "characters of text"),
        (f"{'a' * 600}:\n  {'b' * 600}: 1\n", "the dotted key has 1,201 characters"),
        ("x: &x [*x]\n", "contains itself"),
        ("x: !!int abc\n", "the tag `!!int` is not allowed"),
        ("x: !!set {a, b}\n", "the tag `!!set` is not allowed"),
        ("x: !!python/object/apply:os.system ['id']\n", "is not allowed"),
        (f"x: {'9' * 5_000}\n", "more than 100 digits"),
        (f"x: 0x{'f' * 5_000}\n", "more than 100 digits"),
        ("x: 1e999\n", "too large for a number with 64 bits"),
        ('x: "a\\0b"\n', "NUL character"),
        ('x: "a\\uD800b"\n', "this text contains an unpaired surrogate, which UTF-8 cannot encode"),
        ('"a\\uD800": 1\n', "this text contains an unpaired surrogate, which UTF-8 cannot encode"),
        ("? [a, b]\n: 1\n", "a key must be text, not a list or a section"),
    ],
    ids=range(20),
)
def test_a_hostile_text_is_refused_in_a_sentence(text, said):
    started = time.process_time()
    document = read_yaml(text)
    assert time.process_time() - started < SECONDS
    assert said in "\n".join(problem.message for problem in document.problems)
    assert max(len(str(problem)) for problem in document.problems) < 300


def test_messages_of_the_yaml_parser_are_shortened():
    (problem,) = read_yaml(f"x: *{'y' * 100_000}\n").problems
    assert problem.message.startswith("this is not YAML: found undefined alias 'yyy")
    assert len(problem.message) < 400


def test_infinity_may_be_written_where_a_model_wants_it():
    assert read_yaml("x: [0, .inf]\n").values == {"x": [0, float("inf")]}


@pytest.mark.parametrize("key", ["run.folder", "model.name", "data.train.path", "data.chat_template", "model.adapter"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("~nouser/x", "there is no home folder of `~nouser`. Write the path in full."),
        (f"./{'x' * 300}", "a name in this path has 300 bytes; a file system allows 255."),
        (f"./{'/'.join(['x' * 200] * 30)}", "a file system allows 4095."),
    ],
)
def test_a_path_that_no_system_has_is_a_problem_of_its_key(complaints, key, path, said):
    (found,) = [each for each in complaints(f"{key}={path}") if said in each]
    assert f", {key}: " in found


@pytest.mark.parametrize("key", ["run.folder", "data.train.path", "checkpoint.resume"])
def test_a_path_that_cannot_be_accessed_is_reported_with_the_error(monkeypatch, complaints, key):
    usual = os.stat

    def refused(path, *arguments, **named):
        if "forbidden" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", refused)
    (said,) = complaints(f"{key}=/forbidden/x")
    assert f"{key}: /forbidden/x cannot be accessed: Permission denied." in said


def test_a_pattern_that_leads_through_everything_does_not_hold_the_answer_up(monkeypatch, complaints):
    monkeypatch.setattr("finetune.config.rules.files._TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr("finetune.config.rules.files.islice", lambda *_: threading.Event().wait(SECONDS) or [])
    assert complaints("data.train.path=/data/*/*") == []  # it is left to the run to find them


def test_a_pattern_of_too_many_parts_is_a_problem(complaints):
    (said,) = complaints(f"data.train.path='{'*/' * 1_500}'")
    assert "cannot be accessed" in said


def test_of_many_problems_the_first_are_listed_and_the_others_counted(load, job):
    unknown = "".join(f"  learning_rate{number}: 1\n" for number in range(10_000))
    started = time.process_time()
    with pytest.raises(ConfigError) as error:
        load(text=job.read_text().replace("\ntrain:\n", f"\ntrain:\n{unknown}"))
    assert time.process_time() - started < SECONDS
    lines = str(error.value).splitlines()
    num_problems = int(lines[0].split()[2])
    assert num_problems >= 10_000
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1] == f"  and {num_problems - MAX_LISTED} more"


def test_many_wrong_items_of_a_list_are_found_in_no_time(problems):
    started = time.process_time()
    found = problems(f"evaluate.generate.metrics=[{','.join(['1'] * 20_000)}]")
    assert time.process_time() - started < SECONDS
    assert len(found) == MAX_LISTED


def test_overrides_have_limits(complaints):
    assert "the key is too long" in complaints(".".join(["a"] * 5_000) + "=1")[0]
    assert "more than 100 digits" in complaints(f"train.steps={'9' * 5_000}")[0]
    assert f"nested deeper than {MAX_DEPTH}" in complaints(f"train.steps={'[' * DEEP}")[0]
    assert "is a list with items" in complaints("model.freeze=[a]", f"model.freeze.{'9' * 900}=1")[0]
    assert all(len(each) < 500 for each in complaints(f"train.steps={'x' * 100_000}"))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "fifo"])
def test_only_a_regular_file_is_a_job(tmp_path, path):
    os.mkfifo(tmp_path / "fifo")
    with refused(ConfigError):
        load_config(tmp_path / path)


def test_a_large_file_is_not_read(job):
    job.write_text("# " + "x" * MAX_FILE_BYTES)
    with refused(ConfigError):
        load_config(job)


@pytest.mark.parametrize("written", [b"[", b"- a", b"\xff\xfe", b"x: " + b"[" * 100])
def test_a_damaged_resolved_config_is_reported_as_damaged(tmp_path, written):
    (tmp_path / "resolved.yaml").write_bytes(written)
    for overrides in ([], ["train.steps=1"]):
        with refused(UserError):
            load_resolved(tmp_path, overrides)
