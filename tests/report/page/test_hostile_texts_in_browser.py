"""Names, labels and texts that are markup stay texts on every page, as Chromium draws it."""

import json
from pathlib import Path

import pytest

from finetune.commands.compare.compare import write_comparison
from tests.browser import Browser
from tests.report.page.events import answered, ended, evaluated, started, taken, write_run
from tests.report.page.test_in_browser import report_of

pytestmark = pytest.mark.full

TEXTS = {
    "script": "</script><script>window.hurt=1</script>",
    "image": "<img src=x onerror=window.hurt=1>",
    "link": "<a href='javascript:window.hurt=1' style='x'>%{x}</a><b>bold</b>",
    "attribute": "\"'><svg onload=window.hurt=1><!--<script>",
    "template": "{{7*7}}{% raw %}$\\bad{x}$ &lt;i&gt;\u2028]]>",
}
HOVER = """for (const plot of document.querySelectorAll(".plot")) {
    const points = plot.data.map((_, curve) => ({curveNumber: curve, pointNumber: 0}));
    if (points.length) Plotly.Fx.hover(plot, points); }"""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
ELEMENTS = "img, iframe, object, embed, form, link, base, a[href], svg a, b b, [onerror], [onload]"
FOREIGN = f"""return [...document.querySelectorAll("{ELEMENTS}")]
    .filter(each => !each.closest(".modebar")).map(each => each.outerHTML.slice(0, 200))"""


def hostile_run(folder: Path, text: str, *, seed: int = 0) -> Path:
    """Write a run in which every text that a user, a plugin or a row decides is this one."""
    skipped = {"event": "StepSkipped", "time": 0, "step": 1, "reason": text, "sample_ids": [1], "rows": text}
    write_run(
        folder,
        [
            started(strategy=f"ddp {text}", arithmetic=[text], config={"task": {"name": text}}),
            *(taken(step, 1.0 + seed, metrics={text: 1.0 / step}, device={text: 1.0}) for step in range(1, 31)),
            evaluated(20, **{"loss": 1.0, text: 0.5}),
            evaluated(30, **{"loss": 1.0, text: 0.6}),
            answered(20, text, prompt=text, reference=text),
            {"event": "Warned", "time": 0, "step": 1, "message": text},
            {"event": "Noted", "time": 0, "step": 1, "message": text},
            skipped,
            ended(30, text),
        ],
    )
    (folder / "resolved.yaml").write_text(f"key: {json.dumps(f'{seed} {text}')}  # {text}\n")
    (folder / "environment.json").write_text(json.dumps({text: f"{seed} {text}", "command": [text]}))
    counts = {"rows": 1, "samples": 1, "tokens": 1, "targets": 1}
    (folder / "audit.json").write_text(json.dumps({"sources": [{"key": text, "counts": counts}]}))
    return folder


def as_name(text: str) -> str:
    """Return the text as a file name; the tags that end keep no slash."""
    return text.replace("/", "\u2215")


def require_only_text(browser: Browser, page: Path, text: str) -> None:
    """Open the page, open, hover over and switch whatever can be, and require that no text has become anything else."""
    browser.open(page)
    browser.run(OPEN_ALL)
    browser.run(HOVER)
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") >= 4
    assert browser.run("return window.hurt ?? null") is None
    assert browser.run(FOREIGN) == []
    assert browser.run("return document.scripts.length") == 4
    drawn = text.replace("\u2028", "\\u2028")  # invisible characters are escaped on every page
    assert drawn in browser.run("return document.body.textContent")
    assert browser.complaints() == []


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_texts_of_a_run_stay_texts_in_its_report(browser: Browser, tmp_path: Path, text: str):
    folder = hostile_run(tmp_path / as_name(text), text)
    require_only_text(browser, report_of(folder), text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_texts_of_runs_stay_texts_in_a_comparison(browser: Browser, tmp_path: Path, text: str):
    runs = [hostile_run(tmp_path / f"{number} {as_name(text)}", text, seed=number) for number in range(2)]
    write_comparison(runs, tmp_path / "compare.html")
    require_only_text(browser, tmp_path / "compare.html", text)
