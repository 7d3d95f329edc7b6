"""Reports and comparisons as Chromium draws them."""

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.commands.compare.compare import write_comparison
from finetune.report.history import HistoryReader, RunHistory
from finetune.report.page.charts import charts_of
from finetune.report.page.page import write_report
from tests.browser import Browser
from tests.report.page.events import answered, started, whole_run, write_run
from tests.report.page.test_page import HOSTILE

pytestmark = pytest.mark.full

DRAWN = """return [...document.querySelectorAll(arguments[0] + " .scatterlayer .trace")].map(
    trace => (trace.querySelector("path.js-line")?.getAttribute("d") || "").split(/[ML]/).length - 1)"""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


def report_of(folder: Path) -> Path:
    reader = HistoryReader(folder / "events.jsonl")
    reader.read_new()
    return write_report(folder, reader.history)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    odd = answered(20, HOSTILE, prompt="p" * 500)
    folder = write_run(tmp_path_factory.mktemp("runs") / "a-run-of-a-long-name", [*whole_run(), odd])
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


def test_a_browser_without_decompression_shows_a_message(browser: Browser, run: Path, tmp_path: Path):
    page = report_of(run).read_text().replace("typeof DecompressionStream", "typeof NothingOfTheKind")
    (tmp_path / "page.html").write_text(page)
    browser.driver.get((tmp_path / "page.html").as_uri())
    sentence = browser.wait("const e = document.getElementById('not-drawn'); return !e.hidden && e.textContent")
    assert sentence.startswith("The curves cannot be drawn: this browser is too old; Chrome 80, Firefox 113")


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
    browser.run(set_value, "x-axis", "seconds")
    assert browser.run(axis) == "training time (seconds)"
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


def test_long_names_of_many_runs_leave_the_table_readable(browser: Browser, tmp_path: Path):
    name = "qwen3-8b-lora-rank-16-learning-rate-1.50e-04-global-batch-256-seed-{}"
    write_comparison(
        [write_run(tmp_path / name.format(seed), list(whole_run(20, seed=seed))) for seed in range(6)],
        tmp_path / "page.html",
    )
    browser.open(tmp_path / "page.html")
    height = browser.run(
        "return Math.max(...[...document.querySelectorAll('.stack tr')].map(each => each.offsetHeight))"
    )
    assert height < 120  # a few lines
    assert browser.run("return document.documentElement.scrollWidth") == 1280


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
    first = {"event": "StepTaken", "time": 0, "seconds": 0.5, "num_tokens": 400}
    for start in range(0, len(losses), 100_000):
        values = losses[start : start + 100_000].tolist()
        history.add([first | {"step": step, "loss": loss} for step, loss in enumerate(values, start=start + 1)])
    loss, *_ = charts_of(history)
    page = write_report(tmp_path, history)
    assert page.stat().st_size < 2_500_000  # 2 MB of plotly, compressed
    browser.open(page)
    assert browser.complaints() == []
    high = browser.run("return Math.max(...document.querySelector('#chart-loss .plot').data[0].y)")
    count = browser.run("return document.querySelector('#chart-loss .plot').data[0].y.length")
    assert high == 20.0
    assert 1000 < count == len(loss["series"][0]["x"]) < 5000
    unsmoothed, smoothed = browser.run(DRAWN, "#chart-loss")
    assert unsmoothed > 500
    assert smoothed > 5  # nearly straight
