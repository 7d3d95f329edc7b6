"""Reports and comparisons as Chromium draws them."""

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.commands.compare.compare import write_comparison
from finetune.report.page.charts import charts_of
from finetune.report.page.history import RunHistory
from finetune.report.page.page import write_report
from finetune.report.page.reader import EventsReader
from tests.browser import Browser
from tests.report.page.events import answered, started, taken, whole_run, write_run
from tests.report.page.test_page import HOSTILE

pytestmark = pytest.mark.full

DRAWN = """return [...document.querySelectorAll(arguments[0] + " .scatterlayer .trace")].map(
    trace => (trace.querySelector("path.js-line")?.getAttribute("d") || "").split(/[ML]/).length - 1)"""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


def report_of(folder: Path) -> Path:
    reader = EventsReader(folder / "events.jsonl")
    reader.read_new()
    return write_report(folder, reader.history)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = {"event": "Profiled", "time": 0, "step": 9, "first_step": 5, "num_steps": 4, "wall_seconds": 2.0}
    odd = [answered(20, HOSTILE, prompt="p" * 500), {**profile, "seconds": {"forward": 2.0}, "trace": ""}]
    folder = write_run(tmp_path_factory.mktemp("runs") / "a-run-of-a-long-name", [*whole_run(), *odd])
    (folder / "environment.json").write_text(json.dumps({"command": ["x" * 300], HOSTILE: HOSTILE}))
    (folder / "resolved.yaml").write_text(f"key: {json.dumps('y' * 300)}  # {HOSTILE}\n")
    counts = {"rows": 10**9, "samples": 10**9, "tokens": 10**12, "targets": 10**12}
    (folder / "audit.json").write_text(json.dumps({"sources": [{"key": "data.train", "counts": counts}]}))
    return folder


def test_a_report_is_drawn_without_a_complaint(browser: Browser, run: Path):
    browser.open(report_of(run))
    assert browser.complaints() == []
    assert browser.run("return document.querySelectorAll('#charts .main-svg').length") >= 8
    unsmoothed, smoothed, evaluation = browser.run(DRAWN, "#chart-loss")
    assert unsmoothed > 90 and smoothed > 80  # plotly leaves out points that lie on a straight line
    assert evaluation == 5
    assert browser.run("return window.hurt") is None


def test_the_slider_smooths_and_the_axis_changes(browser: Browser, run: Path):
    browser.open(report_of(run))
    path = "return document.querySelectorAll('#chart-loss path.js-line')[1].getAttribute('d')"
    axis = "return document.querySelector('#chart-loss .xtitle').textContent"
    before = browser.run(path)
    set_value = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    )
    browser.run(set_value, "smoothing", "0.95")
    assert browser.run(path) != before
    browser.run(set_value, "x-axis", "tokens")
    assert browser.run(axis) == "tokens"
    browser.run(set_value, "price", "3600")
    cost = browser.run("return document.querySelector('[data-device-hours]').textContent")
    assert cost == "$60.00"  # 50 s in steps and 5 x 2 s of evaluation
    browser.run("document.getElementById('log').click()")
    assert browser.run("return document.querySelector('#chart-loss .plot')._fullLayout.yaxis.type") == "log"
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme, brightness", [("light", (200, 256)), ("dark", (0, 60))])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    browser: Browser, run: Path, scheme: str, brightness: tuple[int, int]
):
    browser.open(report_of(run), width=360, scheme=scheme)
    browser.run(OPEN_ALL)
    assert browser.run("return document.documentElement.scrollWidth") == 360
    red = browser.run("return parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert red in range(*brightness)
    assert browser.complaints() == []


def test_a_comparison_is_drawn_at_both_widths(browser: Browser, run: Path, tmp_path: Path):
    other = write_run(tmp_path / "other", list(whole_run(80, seed=1, processes=4)))
    (other / "environment.json").write_text(json.dumps({"launcher": {"ACCELERATE_" + "LONG_" * 20: "1"}}))
    write_comparison([run, other], tmp_path / "page.html")
    for width in (1280, 360):
        browser.open(tmp_path / "page.html", width=width)
        assert browser.run("return document.documentElement.scrollWidth") == width
        drawn = browser.run(DRAWN, "#chart-loss")
        assert len(drawn) == 6
        assert sorted(drawn)[:2] == [4, 5] and sorted(drawn)[2] > 60
        assert browser.complaints() == []


def test_a_million_points_are_drawn_with_their_spike(browser: Browser, tmp_path: Path):
    history = RunHistory()
    losses = np.random.default_rng(0).normal(2.0, 0.1, 1_000_000)
    losses[777_776] = 20.0
    history.add([started(num_steps=len(losses))])
    for start in range(0, len(losses), 100_000):
        history.add(
            [taken(start + 1 + place, loss) for place, loss in enumerate(losses[start : start + 100_000].tolist())]
        )
    loss, *_ = charts_of(history)
    page = write_report(tmp_path, history)
    assert page.stat().st_size < 8_000_000
    browser.open(page)
    assert browser.complaints() == []
    high = browser.run("return Math.max(...document.querySelector('#chart-loss .plot').data[0].y)")
    count = browser.run("return document.querySelector('#chart-loss .plot').data[0].y.length")
    assert high == 20.0
    assert 1000 < count == len(loss["series"][0]["x"]) < 5000
    unsmoothed, smoothed = browser.run(DRAWN, "#chart-loss")
    assert unsmoothed > 500
    assert smoothed > 20  # nearly straight
