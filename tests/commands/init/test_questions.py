import re
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from finetune.cli.app import app
from finetune.commands.init import questions
from finetune.commands.init.init import recipes
from finetune.config.load import load_config
from finetune.registry.tasks import TASKS

ROWS = {
    "chats.jsonl": '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n' * 3,
    "pairs.csv": "premise,hypothesis,label\nA man walks,He is outside,yes\nTwo kids play,Nobody is here,no\n",
    "pairs.jsonl": '{"prompt": "Hi", "chosen": "Hello there", "rejected": "No"}\n',
}


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    for name, text in ROWS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str):
    return CliRunner().invoke(app, ["init", *words])


def job(folder="job"):
    return YAML(typ="safe").load(Path(folder, "job.yaml"))


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        ("sft", "chats.jsonl", ("--lora",)),
        ("sft", "chats.jsonl", ("--full", "--gpus", "0")),
        ("preference", "pairs.jsonl", ("--lora", "--gpus", "2")),
        ("reward", "pairs.jsonl", ("--full", "--gpus", "4")),
        ("text_classification", "pairs.csv", ("--full",)),
    ],
)
def test_flags_answer_all_questions(task, data, words):
    result = init("--task", task, "--data", data, "--model", "org/base", "--into", "job", *words)
    assert result.exit_code == 0, result.output
    assert "job.yaml is ready." in result.output and "start with: finetune train --config" in result.output
    written = job()
    assert written["task"]["name"] == task and written["model"]["name"] == "org/base"
    assert ("lora" in written["model"]) is ("--lora" in words)
    assert ("precision" in written["train"]) is ("0" not in words)


def test_two_columns_of_text_are_both_trained_on():
    init("--task", "text_classification", "--data", "pairs.csv", "--model", "org/base", "--full", "--into", "job")
    assert job()["data"]["train"]["columns"] == {"text": "premise", "text_pair": "hypothesis"}


def test_questions_are_asked_on_a_terminal_until_they_are_answered(monkeypatch, capsys):
    answers = iter(["sftt", "sft", "nothing.jsonl", "pairs.csv", "chats.jsonl", "./none", "", "two", "2", "lora"])
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    questions.init_by_answers(questions.Answers(), None)
    output = capsys.readouterr().out
    assert next(answers, None) is None and len(asked) == 10
    assert "Did you mean `sft`?" in output and "fit none of the formats of `sft`" in output
    assert "write a whole number" in output and "columns" in output
    assert job("sft")["model"]["name"] == "Qwen/Qwen3-0.6B" and job("sft")["train"]["global_batch_size"] == 32


@pytest.mark.parametrize("name", ["tiny", "./tiny", "../{folder}/tiny", "{root}/tiny", ".\\tiny"])
def test_a_folder_with_a_model_is_found_from_the_folder_of_the_job(tmp_path, name):
    Path("tiny").mkdir()
    Path("tiny", "config.json").write_text("{}")
    name = name.format(folder=tmp_path.name, root=tmp_path)
    result = init("--task", "sft", "--data", "./chats.jsonl", "--model", name, "--full", "--into", "far/away")
    assert result.exit_code == 0, result.output
    config = load_config(Path("far/away/job.yaml")).config
    assert config.model.name == str(tmp_path / "tiny") and config.data.train.path == str(tmp_path / "chats.jsonl")


@pytest.mark.parametrize("name", ["./tiny", "../tiny", "/none/tiny", "~/none/tiny", "~no_such_user/tiny", "empty"])
def test_a_folder_without_a_model_is_refused_and_nothing_is_written(name):
    Path("empty").mkdir()
    result = init("--task", "sft", "--data", "chats.jsonl", "--model", name, "--full", "--into", "job")
    assert result.exit_code == 2 and not Path("job").exists()
    assert "is not a folder with a model and its config.json" in " ".join(result.output.split())


def test_nothing_is_written_where_the_job_would_not_check():
    Path("job").mkdir()
    Path("job", "runs").write_text("a file where the run's folder would be\n")
    result = init("--task", "sft", "--data", "chats.jsonl", "--model", "org/base", "--full", "--into", "job")
    assert result.exit_code == 2 and "run.folder" in result.output
    assert [path.name for path in Path("job").iterdir()] == ["runs"]


def test_nothing_is_asked_without_a_terminal():
    assert init().stdout.splitlines()[0].split()[0] == next(iter(recipes()))
    result = init("--task", "sft")
    assert result.exit_code == 2 and "--data: it is missing, and without a terminal" in result.output
    result = init("--data", "chats.jsonl")
    assert result.exit_code == 2 and "--task: it is missing" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "sftt", "--data", "chats.jsonl"), "--task sftt: .*Did you mean `sft`"),
        (("--task", "sft", "--data", "none.jsonl"), "--data none.jsonl: "),
        (("--task", "sft", "--data", "pairs.csv"), "--data pairs.csv: the columns premise, hypothesis, label fit none"),
        (("quickstart", "--task", "sft"), "they are for a job without a recipe"),
    ],
)
def test_an_answer_that_is_not_possible_is_one_message(words, message):
    result = init(*words)
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output


def test_each_task_has_a_recipe_whose_settings_are_used():
    for task in TASKS:
        recipe = questions._recipe(task.name, has_lora=False)
        assert recipe["task"]["name"] == task.name and recipe["train"]["learning_rate"] > 0
