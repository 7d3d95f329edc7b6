"""What older versions wrote: a job is refused with the line to write instead, a recorded run is read."""

import json

import pytest

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import check_changes
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config, load_resolved
from finetune.config.resume_keys import keys_that_must_match
from finetune.config.section import has_key
from finetune.errors import CheckpointError, ConfigError
from tests.refusals import pinned, refused
from tests.small_job import JOB, write_job


def test_version_1_may_be_written(tmp_path):
    plain = load_config(write_job(tmp_path)).config
    assert load_config(write_job(tmp_path, text=f"version: 1\n{JOB}")).config == plain
    assert has_key(plain, "version") and resolved_yaml(load_config(tmp_path / "job.yaml")).splitlines()[1].startswith(
        "version: 1 "
    )


@pytest.mark.parametrize("written", ["2", "0", "'1'", "true"])
def test_another_version_is_refused_with_what_to_do(tmp_path, written):
    path = write_job(tmp_path, text=f"version: {written}\n{JOB}")
    with refused(ConfigError) as error:
        load_config(path)
    assert "line 1, version: " in str(error.value) and len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    "written",
    [
        'run.on_end="  "',
        'run.on_end="a\\0b"',
        "run.on_end=[a]",
        "run.on_end={command: a, when: [finished]}",
        "run.on_end.command=sudo shutdown -h now",
    ],
)
def test_an_invalid_command_at_the_end_is_one_problem(problems, written):
    (problem,) = problems(written)
    assert problem.key == "run.on_end"
    pinned(problem)


FORMER = {
    "ia3: {target_modules: [k_proj], feedforward_modules: [k_proj]}": {
        "type": "ia3",
        "values": {"target_modules": ["k_proj"], "feedforward_modules": ["k_proj"]},
    },
    "ia3: {}": {"type": "ia3", "values": {}},
    "oft: {block_size: 8, dropout: 0.1}": {
        "type": "oft",
        "values": {"oft_block_size": 8, "module_dropout": 0.1, "target_modules": "all-linear"},
    },
    "prompt_tuning: {num_tokens: 4, init_text: two words}": {
        "type": "prompt_tuning",
        "values": {"num_virtual_tokens": 4, "prompt_tuning_init_text": "two words"},
    },
    "prefix_tuning: {}": {"type": "prefix_tuning", "values": {"num_virtual_tokens": 16}},
}
RECORDED_NULL = {f"model.{name}": "null" for name in ("ia3", "oft", "prompt_tuning", "prefix_tuning")}
"""What older versions recorded of a run without these adapters."""


def with_model_key(line):
    assert "model:\n" in JOB
    return JOB.replace("model:\n", f"model:\n  {line}\n")


@pytest.mark.parametrize("line", FORMER)
def test_the_error_of_an_old_job_has_the_line_that_is_accepted(tmp_path, line):
    key = f"model.{line.partition(':')[0]}"
    with refused(ConfigError) as error:
        load_config(write_job(tmp_path, text=with_model_key(line)))
    (problem,) = error.value.problems
    text = with_model_key(line)
    assert (problem.key, problem.line) == (key, text.splitlines().index(f"  {line}") + 1)
    advised = problem.message.partition("Write `")[2].partition("` in its place")[0]
    config = load_config(write_job(tmp_path, text=with_model_key(advised))).config
    assert config.model.peft.model_dump() == FORMER[line]


def test_an_override_of_an_old_section_has_the_same_error(tmp_path):
    with refused(ConfigError) as error:
        load_config(write_job(tmp_path), ["model.oft.block_size=8"])
    (problem,) = error.value.problems
    assert problem.key == "model.oft" and '"oft_block_size": 8' in problem.message
    assert "--set" in str(error.value)


@pytest.mark.parametrize("line", FORMER)
def test_the_config_of_an_old_run_is_read_as_the_new_one(tmp_path, line):
    resolved = resolved_yaml(load_config(write_job(tmp_path)))
    old = [f"  {name}: null" for name in ("ia3", "oft", "prompt_tuning", "prefix_tuning") if not line.startswith(name)]
    assert resolved.count("model:\n") == 1
    (tmp_path / "resolved.yaml").write_text(resolved.replace("model:\n", "\n".join(["model:", f"  {line}", *old, ""])))
    assert "  peft: null" in resolved
    assert load_resolved(tmp_path).config.model.peft.model_dump() == FORMER[line]


def changes_since(saved, current):
    no_settings = {"settings": {}, "origin": {}}
    return check_changes(
        "step-000004",
        RunFingerprint(identity=saved, **no_settings),
        current=RunFingerprint(identity=current, **no_settings),
        allowed=(),
    )


def test_an_old_checkpoint_resumes_under_the_new_key_and_no_other_adapter(tmp_path):
    line = "oft: {block_size: 8, dropout: 0.1}"
    adapter = json.dumps(FORMER[line])
    current = keys_that_must_match(load_config(write_job(tmp_path), [f"model.peft={adapter}"]).config)
    others = {key: text for key, text in current.items() if not key.startswith("model.peft")}
    saved = {**others, **RECORDED_NULL, "model.oft": "written", "model.oft.block_size": "8"}
    saved |= {"model.oft.dropout": "0.1", "model.oft.target_modules": '"all-linear"'}
    assert changes_since(saved, current) == []
    with refused(CheckpointError, "model.peft.values"):
        changes_since({**saved, "model.oft.block_size": "16"}, current)
    without = keys_that_must_match(load_config(write_job(tmp_path)).config)
    with refused(CheckpointError, "model.peft"):
        changes_since(saved, without)
    assert changes_since({**without, **RECORDED_NULL}, without) == []
