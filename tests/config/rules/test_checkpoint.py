"""Values of `run.on_end`: a command, or the line to write for what was a section."""

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.load import load_resolved


@pytest.mark.parametrize("written", ['run.on_end="  "', 'run.on_end="a\\0b"', "run.on_end=5", "run.on_end=[a]"])
def test_an_invalid_on_end_command_is_one_problem(problems, written):
    (problem,) = problems(written)
    assert problem.key == "run.on_end"


@pytest.mark.parametrize(
    ("section", "case"),
    [
        ("command: 'echo \"$${a}\"'", 'finished|failed) echo "${a}" ;;'),
        (
            "command: a, when: [finished, idle, stopped], restart_seconds: 5, where: first_host",
            "finished|stopped) a ;;",
        ),
        ("command: a, when: [idle]", "*) a ;;"),
    ],
)
def test_the_line_for_a_former_on_end_section_is_a_valid_job(load, problems, section, case):
    (problem,) = problems(f"run.on_end={{{section}}}")
    assert problem.key == "run.on_end"
    line = problem.message.split("`")[1]
    command = load(line.replace("on_end: ", "run.on_end=")).config.run.on_end
    assert command == f'case "$FINETUNE_OUTCOME" in {case} esac'


def test_a_former_on_end_key_on_the_command_line_is_one_problem(problems):
    (problem,) = problems("run.on_end.command=sudo shutdown -h now")
    assert problem.key == "run.on_end" and "sudo shutdown -h now ;; esac" in problem.message


def test_a_resolved_command_is_read_back(load, tmp_path):
    loaded = load("run.on_end=sudo shutdown -h now")
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(loaded))
    assert load_resolved(tmp_path).config.run.on_end == loaded.config.run.on_end == "sudo shutdown -h now"
