"""What a test measures: kept with its report, judged by its limit, printed as a table and written as JSON.

With `--figures FILE` the file says of every test how it ended, how long it took and what it measured. Another run adds
its tests to it, those of the same name anew; with `--rest` it leaves out what has passed.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.runtime.files.atomic import write_json
from tests.gpu import machine

Figure = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="write what the tests have measured to this JSON file, or add it")
    parser.addoption("--rest", action="store_true", help="leave out what has passed by the file of --figures")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--figures")
    if file is not None and not hasattr(config, "workerinput"):  # a worker's reports come to the first process
        config.pluginmanager.register(_Record(file), "figures-record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed, where only the rest is asked for."""
    if not config.getoption("--rest"):
        return
    file = config.getoption("--figures")
    if file is None:
        raise pytest.UsageError("--rest needs --figures FILE, which says what has passed")
    passed = {name for name, test in _read(file)["tests"].items() if test["outcome"] == "passed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return a function that keeps a measured value under a name and fails the test where it is past its limit."""

    def keep(what: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        is_kept = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        found = {"what": what, "value": value, "at_most": at_most, "at_least": at_least, "is_kept": is_kept}
        request.node.user_properties.append(("figure", {"test": request.node.nodeid, **found, "gpu": _is_gpu(request)}))
        assert is_kept, f"{what}: {value:.4g}, allowed are {_limit(found)}"

    return keep


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the figures of tests that ran on a GPU, or all where they are asked for by `--figures`."""
    file = config.getoption("--figures")
    found = [each for each in _figures(terminalreporter) if file or each["gpu"]]
    if found:
        terminalreporter.section("figures")
        for each in found:
            verdict = "" if each["is_kept"] else "  MISSED"
            terminalreporter.line(f"{each['what']}: {each['value']:.4g} ({_limit(each)}){verdict}")


class _Record:
    """Writes the file after every test: what is stopped from outside has lost nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._content = _read(file)

    def pytest_collection_finish(self) -> None:
        self._content["machine"] = machine()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        figures = [value for name, value in report.user_properties if name == "figure"]
        kept = [{name: each[name] for name in each if name not in ("test", "gpu")} for each in figures]
        found = {"outcome": report.outcome, "seconds": round(report.duration, 2), "figures": kept}
        self._content["tests"][report.nodeid] = found
        write_json(self._file, self._content, exact=True)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"machine": {}, "tests": {}}


def _figures(terminalreporter: Any) -> Iterator[dict[str, Any]]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                yield from (value for name, value in report.user_properties if name == "figure")


def _is_gpu(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("gpu") is not None


def _limit(found: dict[str, Any]) -> str:
    bounds = [f"at most {found['at_most']:.4g}"] if found["at_most"] is not None else []
    bounds += [f"at least {found['at_least']:.4g}"] if found["at_least"] is not None else []
    return ", ".join(bounds) or "no limit"
