"""Words reach the shell as they are, whatever is in them; YAML is read alike by readers of YAML 1.1 and 1.2."""

import json
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from finetune.launch.jobs import ShellText, command_line, exports, render_script, yaml_text
from tests.launch.hostile import HOSTILE

PRINT = ["python3", "-c", "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_hostile_arguments_and_variables_arrive_unchanged(shell, tmp_path):
    variables = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE)}
    expanded = [ShellText(f'"${name}"') for name in variables]
    script = "\n".join([*exports(variables), command_line([*PRINT, *HOSTILE, *expanded])])
    ran = subprocess.run([shell, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    words, environment = json.loads(ran.stdout)
    assert words == [*HOSTILE, *HOSTILE] and variables.items() <= environment.items()
    assert len(HOSTILE) > 20 and list(tmp_path.iterdir()) == []


def test_a_job_template_does_not_expand_user_text():
    text = render_script("host.sh.jinja", assignments=["X={{ secret }}"], launch="{% raw %}", next="{{ 7 * 7 }}")
    assert "{{ secret }}" in text and "{% raw %}" in text and "{{ 7 * 7 }}" in text


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
VALUES = st.recursive(
    TEXTS | st.integers(-10, 10) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def read_both(text: str) -> tuple[list, list]:
    return list(yaml.safe_load_all(text)), list(YAML(typ="safe").load_all(text))


def test_hostile_texts_are_the_same_for_both_readers():
    document = {"list": list(HOSTILE), "map": {word: word for word in HOSTILE}}
    older, newer = read_both(yaml_text([document, document], comment="two\nlines"))
    assert older == newer == [document, document]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_any_document_is_the_same_for_both_readers(document):
    older, newer = read_both(yaml_text([document], comment="x"))
    assert older == newer == [document]


def test_a_script_keeps_its_lines():
    text = yaml_text([{"run": "first\n  second\n"}], comment="x")
    assert "run: |\n  first\n    second\n" in text
