"""Words reach the shell as they are, whatever is in them."""

import json
import subprocess

import pytest

from finetune.launch.jobs.shell import ShellText, command_line, exports, render
from tests.launch.jobs.hostile import HOSTILE

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
    text = render("host.sh.jinja", assignments=["X={{ secret }}"], launch="{% raw %}", next="{{ 7 * 7 }}")
    assert "{{ secret }}" in text and "{% raw %}" in text and "{{ 7 * 7 }}" in text
