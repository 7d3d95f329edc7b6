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
from finetune.data.sources.source import open_sources
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
    questions.init_by_answers(questions.InitAnswers(), None)
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
    assert questions._recipe("sft", has_lora=True)["run"]["folder"] == "runs/sft-jsonl"  # not the quickstart's


@pytest.mark.parametrize(
    ("num_rows", "words", "num_steps", "every"),
    [
        (1, (), "1 step of", 1),
        (10, (), "1 step of", 1),
        (777, (), "47 steps of 16", 4),
        (777, ("--gpus", "2"), "24 steps of 32", 2),
        (20_000, (), "1,188 steps of 16", 100),
    ],
)
def test_the_number_of_steps_is_printed_and_sets_how_often_the_job_evaluates_saves_and_logs(
    num_rows, words, num_steps, every
):
    Path("rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n' * num_rows)
    result = init("--task", "sft", "--data", "rows.jsonl", "--model", "org/base", "--lora", "--into", "job", *words)
    assert result.exit_code == 0, result.output
    assert f"It takes {num_steps}" in result.output
    written = job()
    assert written["checkpoint"]["every_steps"] == every
    assert written["report"]["log_every_steps"] == min(10, every)
    assert written["train"]["schedule"]["warmup_fraction"] == (0.03 if num_rows == 20_000 else 0.1)
    assert written.get("evaluate") == (None if num_rows == 1 else {"every_steps": every})
    assert ("validation" in written["data"]) is (num_rows > 1)
    sources = open_sources(load_config(Path("job/job.yaml")).config.data, seed=1, log=print)
    num_kept = len(list(sources.train[0].rows()))
    assert num_steps.startswith(f"{-(-num_kept // written['train']['global_batch_size']):,} ")


@pytest.mark.parametrize(
    ("words", "file", "num_processes"),
    [
        ((), None, None),
        (("--gpus", "2"), "ddp.yaml", 2),
        (("--gpus", "4", "--strategy", "zero2"), "zero2.yaml", 4),
        (("--strategy", "fsdp2"), "fsdp2.yaml", 2),
        (("--strategy", "single"), "single.yaml", 1),
    ],
)
def test_a_named_strategy_or_several_gpus_write_an_accelerate_file_that_the_last_line_names(words, file, num_processes):
    result = init("--task", "sft", "--data", "chats.jsonl", "--model", "org/base", "--lora", "--into", "job", *words)
    assert result.exit_code == 0, result.output
    accelerate = sorted(path.name for path in Path("job").glob("*.yaml") if path.name != "job.yaml")
    assert accelerate == ([] if file is None else [file])
    named = "" if file is None else f" --accelerate job/{file} --processes {num_processes}"
    assert result.output.splitlines()[-1] == f"start with: finetune train --config job/job.yaml{named}"
    if file is not None:
        assert f"num_processes: {num_processes}\n" in Path("job", file).read_text()
