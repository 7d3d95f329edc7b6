"""What `finetune check` says of the rows for training and evaluation."""

import pytest

from finetune.config.explain import format_summary, resolved_yaml
from finetune.config.formatting import job_yaml
from finetune.config.load import load_config
from finetune.config.overrides import apply_overrides, override_text
from finetune.config.yaml import read_yaml


def test_every_value_stands_with_its_source(load, tmp_path):
    lines = resolved_yaml(load("train.steps=20")).splitlines()
    by_key = {line.partition(":")[0].strip(): line for line in lines}
    assert by_key["folder"].split() == ["folder:", f'"{tmp_path}/runs/first"', "#", "job.yaml", "line", "2"]
    assert by_key["learning_rate"].split() == ["learning_rate:", "0.0001", "#", "job.yaml", "line", "15"]
    assert by_key["steps"].split() == ["steps:", "20", "#", "--set"]
    assert by_key["precision"].split() == ["precision:", '"fp32"', "#", "default"]
    assert by_key["evaluate"].split() == ["evaluate:", "null", "#", "default"]


def test_a_key_that_does_nothing_stands_in_a_comment(load):
    assert "    # momentum: null  (no effect here)" in resolved_yaml(load()).splitlines()
    assert "    # momentum" not in resolved_yaml(load("train.optimizer.name=sgd"))


MIX = "data.train={mix: [{path: rows.jsonl, weight: 1}, {path: rows.jsonl, take: 5, weight: 2.5}], until: all}"


@pytest.mark.parametrize("train", ["data.train.skip=1", MIX])
def test_the_resolved_file_is_a_job_that_gives_the_same_config(load, tmp_path, train):
    loaded = load(
        train,
        "evaluate={generate: {show: 0}}",
        "data.validation.path=rows.jsonl",
        "data.system_prompt='a: #b\n\"c\" é'",
        "model.lora={target_modules: [q_proj]}",
        "train.optimizer.eps=1e-12",
    )
    again = tmp_path / "elsewhere" / "resolved.yaml"
    again.parent.mkdir()
    again.write_text(resolved_yaml(loaded))
    assert load_config(again).config == loaded.config


MIX_summary = "data.train={mix: [{path: rows.jsonl, weight: 1.5}, {name: squad, weight: 2.0, stream: {}}]}"
EVALUATED = "evaluate={}"

ROWS = [
    (["data.train.stream={}"], "FOLDER/rows.jsonl as a stream"),
    ([MIX_summary], "a mix of FOLDER/rows.jsonl (weight 1.5), squad as a stream (weight 2)"),
    ([EVALUATED, "data.validation={name: squad, split: dev}"], "FOLDER/rows.jsonl, evaluated on squad"),
    ([EVALUATED, "data.validation={fraction: 0.05}"], "FOLDER/rows.jsonl, evaluated on 0.05 of its rows"),
    ([EVALUATED, "data.validation={hash_fraction: 0.1}"], "evaluated on 0.1 of its rows"),
    (
        [EVALUATED, "data.validation={path: rows.jsonl, exclude_from_train: true}"],
        "evaluated on FOLDER/rows.jsonl",
    ),
]


@pytest.mark.parametrize(("written", "said"), ROWS)
def test_the_first_line_of_the_summary_names_task_and_data(load, tmp_path, written, said):
    line = format_summary(load(*written).config, num_processes=1)[0]
    assert line.startswith("task     sft, from ")
    assert line.endswith(said.replace("FOLDER", str(tmp_path)))


def test_text_with_variables_of_the_shell_is_read_back_as_it_was(load):
    loaded = load('run.on_end="echo $${RUN} $$${x}"')
    assert loaded.config.run.on_end == "echo ${RUN} $${x}"
    for text in (resolved_yaml(loaded), job_yaml(loaded.config)):
        document = read_yaml(text)
        assert document.problems == [] and document.values["run"]["on_end"] == "echo ${RUN} $${x}"
    (again,) = (apply_overrides({}, [override_text("run.on_end", "echo ${RUN}")]).values,)
    assert again == {"run": {"on_end": "echo ${RUN}"}}
