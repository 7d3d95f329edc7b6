"""Tools and gatherers that are missing, fail or hang leave a reason."""

import re
import threading
from pathlib import Path

import pytest

from finetune.commands import doctor
from finetune.commands.doctor.findings import finding_texts, gather_all, run_tool


def test_a_tool_that_is_missing_or_hangs_is_an_error_with_a_reason():
    assert run_tool(["echo", "here"]) == "here\n"
    with pytest.raises(OSError, match="`no-such-tool` is not installed"):
        run_tool(["no-such-tool"])
    with pytest.raises(OSError, match=r"`sleep 60` did not answer within 0.1 s"):
        run_tool(["sleep", "60"], seconds=0.1)


def test_gatherers_that_fail_or_hang_do_not_affect_the_others():
    never = threading.Event()
    results, unread = gather_all(
        {"good": lambda: 7, "bad": lambda: 1 // 0, "stuck": never.wait, "missing": lambda: run_tool(["no-such-tool"])},
        seconds=0.3,
    )
    never.set()
    assert results == {"good": 7}
    assert sorted(unread) == [
        "bad: integer division or modulo by zero",
        "missing: `no-such-tool` is not installed",
        "stuck: no answer within 0.3 s",
    ]


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "before-a-run.md"
CALL = re.compile(r'(?<!\w)finding\(\s*"([a-z0-9/-]+)"')


def test_every_finding_of_the_code_has_its_texts_and_nothing_else():
    sources = "".join(file.read_text() for file in Path(doctor.__path__[0]).rglob("*.py"))
    used = CALL.findall(sources)
    assert len(used) > 70 and set(used) == finding_texts().keys()
    assert all(row.keys() == {"what", "why", "fix"} and all(row.values()) for _, row in finding_texts().values())


def test_every_check_is_on_the_page_and_nothing_else():
    keys = {name.partition("/")[0] for name in finding_texts()}
    rows = [
        line.split("|")[1]
        for line in PAGE.read_text().split("\n## Check the machine\n")[1].splitlines()
        if line.startswith("| `")
    ]
    assert len(keys) > 60
    assert {key for row in rows for key in re.findall(r"`([a-z0-9-]+)`", row)} == keys
