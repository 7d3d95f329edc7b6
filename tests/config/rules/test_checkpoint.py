"""Values of `run.on_end`; a machine is not shut down before a hang is reported."""

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.load import load_resolved


def test_a_text_is_the_command_of_a_section(load):
    short = load("run.on_end=sudo shutdown -h now").config.run.on_end_section
    assert short == load("run.on_end.command=sudo shutdown -h now").config.run.on_end_section
    assert (short.when, short.where) == (("finished", "failed", "idle"), "each_host")
    assert load().config.run.on_end_section is None


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ('run.on_end="  "', "run.on_end"),
        ('run.on_end="a\\0b"', "run.on_end"),
        ("run.on_end=5", "run.on_end"),
        ("run.on_end={when: [idle]}", "run.on_end.command"),
        ("run.on_end={command: a, when: [done]}", "run.on_end.when.0"),
        ("run.on_end={command: a, when: []}", "run.on_end.when"),
        ("run.on_end={command: a, timeout_seconds: 0}", "run.on_end.timeout_seconds"),
        ("run.on_end={command: a, idle_after_seconds: 1800}", "run.on_end.idle_after_seconds"),
    ],
)
def test_an_invalid_on_end_hook_is_one_problem(problems, written, key):
    (problem,) = problems(written)
    assert problem.key == key


def test_a_longer_wait_for_hangs_needs_a_longer_wait_for_idleness(problems):
    (problem,) = problems("run.hang_after_seconds=3600", "run.on_end=a")
    assert problem.key == "run.on_end"
    assert "Write `idle_after_seconds: 7200`" in problem.message
    assert problems("run.hang_after_seconds=null", "run.on_end={command: a, idle_after_seconds: 5}") == []


def test_a_resolved_config_is_read_back(load, tmp_path):
    from_text = load("run.on_end={command: a, when: [finished]}")
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(from_text))
    assert load_resolved(tmp_path).config.run.on_end_section == from_text.config.run.on_end_section
