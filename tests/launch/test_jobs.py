"""Words reach the shell as they are, whatever is in them; YAML is read alike by readers of YAML 1.1 and 1.2."""

import json
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from finetune.launch.jobs import ShellText, command_line, quoted, render, yaml_text
from tests.launch.hostile import HOSTILE

PRINT = ["python3", "-c", "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_hostile_arguments_and_variables_arrive_unchanged(shell, tmp_path):
    variables = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE)}
    expanded = [ShellText(f'"${name}"') for name in variables]
    exports = [f"export {name}={quoted(value)}" for name, value in variables.items()]
    script = "\n".join([*exports, command_line([*PRINT, *HOSTILE, *expanded])])
    ran = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    words, environment = json.loads(ran.stdout)
    assert words == [*HOSTILE, *HOSTILE] and variables.items() <= environment.items()
    assert len(HOSTILE) > 20 and list(tmp_path.iterdir()) == []


def test_a_job_template_does_not_expand_user_text():
    text = render("host.sh.jinja", variables={"X": "{{ secret }}"}, launch="{% raw %}", next="{{ 7 * 7 }}")
    assert "{{ secret }}" in text and "{% raw %}" in text and "{{ 7 * 7 }}" in text


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def require_same_for_both_readers(text: str) -> None:
    document = f"- key: {yaml_text(text, indent=6)}\n- {yaml_text(text, indent=4)}\n"
    assert yaml.safe_load(document) == YAML(typ="safe").load(document) == [{"key": text}, text]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_the_same_for_both_readers(text):
    require_same_for_both_readers(text)
    require_same_for_both_readers(f"{text}\n{text}\n")


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_any_text_is_the_same_for_both_readers(text):
    require_same_for_both_readers(text)
    require_same_for_both_readers(f"x{text}\n y\n")


def test_a_script_keeps_its_lines():
    assert yaml_text("first\n  second\n", indent=2) == "|\n  first\n    second"
