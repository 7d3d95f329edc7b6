"""Tools and gatherers that are missing, fail or hang leave a reason."""

import threading

import pytest

from finetune.commands.doctor.findings import gather_all, run_tool


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
