"""The product's messages: a test names the facts in one, and its whole sentence stands in a file of `tests/messages`.

`pytest --update-golden` writes the sentences of the tests that it runs, and leaves those of other tests as they are.
A test whose messages are not those of the file fails.
"""

import difflib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from finetune.errors import FinetuneError

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("messages")

_current: set[str] = set()  # messages of the test that is running
_updated: dict[str, set[str]] = {}  # messages to be written, by the node id of the test

_VARYING = {
    rf"{tempfile.gettempdir()}/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/[\w-]+": "FOLDER",
    re.escape(str(ROOT)): "REPOSITORY",
    r"(?<=[\s`'(])/\S*/site-packages": "PACKAGES",
    rf"{re.escape(str(Path.home()))}(?=/)": "HOME",
    rf"{tempfile.gettempdir()}/tmp\w{{8}}": "TEMPORARY",
    r"(?<=127\.0\.0\.1:)\d+|(?<=localhost:)\d+": "PORT",
    r"(?<![\d.])\d+\.\d+\.\d+((\.|rc|a|b)\w+)?(\+\w+)?(?!\d|\.\d)": "VERSION",
    r"\b0x[0-9a-f]{6,}\b": "ADDRESS",
    r"\b[0-9a-f]{32}\b": "DIGEST",
}


@contextmanager
def refused(
    kind: type[FinetuneError], *facts: object, varies: bool = False
) -> Iterator[pytest.ExceptionInfo[FinetuneError]]:
    """Require an error of this kind with these facts in its message, which is the golden one; see `pinned`."""
    with pytest.raises(kind) as caught:
        yield caught
    pinned(caught.value, *facts, varies=varies)


def pinned(message: object, *facts: object, varies: bool = False) -> None:
    """Require the facts (keys, files, lines, numbers, values) in the message, and its sentence in the golden file.

    A message that `varies` with the machine or with a library's version is not compared with the file.
    """
    text = str(message)
    for fact in facts:
        assert str(fact) in text, f"not in the message: {fact}\n{text}"
    for pattern, name in _VARYING.items():
        text = re.sub(pattern, name, text)
    _current.update([] if varies else [text])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the messages of the tests to tests/messages")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Forget the messages of tests that are gone, where whole files were collected; one process does it for all."""
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if config.getoption("--update-golden") and is_first and not any("::" in name for name in config.args):
        tests = {item.nodeid for item in items}
        files = {_file(test) for test in tests}
        for path in GOLDEN.glob("*.txt"):
            golden = _read(path)
            others = {test for test in golden if _file(test) not in files and (ROOT / _file(test)).exists()}
            _write(path, {test: messages for test, messages in golden.items() if test in tests | others})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare the messages of a test that has passed with the golden ones, or report them to be written."""
    _current.clear()
    yield
    golden = _golden(_path(item.nodeid)).get(item.nodeid, set())
    if item.config.getoption("--update-golden"):
        item.user_properties.append(("messages", sorted(_current)))
    elif golden != _current:
        texts = ("\n".join(sorted(messages)).splitlines() for messages in (golden, _current))
        lines = difflib.unified_diff(*texts, "golden", "now", lineterm="", n=0)
        advice = f"If the new messages are right: pytest --update-golden '{item.nodeid}'"
        pytest.fail("\n".join(["The messages of this test have changed.", *lines, advice]), pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the messages of a test that has passed; reports of workers come to the first process."""
    if report.when == "call" and report.passed and "messages" in dict(report.user_properties):
        _updated[report.nodeid] = set(dict(report.user_properties)["messages"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--update-golden") and not hasattr(session.config, "workerinput"):
        for path in {_path(test) for test in _updated}:
            _write(path, _read(path) | {test: found for test, found in _updated.items() if _path(test) == path})


def _file(test: str) -> str:
    return test.partition("::")[0]


def _path(test: str) -> Path:
    """Return the golden file of a test: that of its folder in `tests`."""
    return GOLDEN / f"{Path(_file(test)).parts[1]}.txt"


def _read(path: Path) -> dict[str, set[str]]:
    """Return the messages by test; below each message the file has the node ids of its tests, each after a `#`."""
    messages: dict[str, set[str]] = defaultdict(set)
    text = path.read_bytes().decode() if path.exists() else ""
    for message, tests in re.findall(r"([^\0]*?)\n((?:    # .*\n)+)\n?", text):
        for test in re.findall("    # (.*)\n", tests):
            messages[test].add(message)
    return messages


_golden = cache(_read)


def _write(path: Path, messages: dict[str, set[str]]) -> None:
    tests: dict[str, str] = defaultdict(str)
    for test in sorted(messages):
        for message in messages[test]:
            tests[message] += f"    # {test}\n"
    if not tests:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"{message}\n{tests[message]}" for message in sorted(tests)), encoding="utf-8")
