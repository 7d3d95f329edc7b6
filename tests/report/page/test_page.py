"""The page holds what a reader looks for, and no data of users becomes markup or script."""

import base64
import gzip
import json
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from finetune.report.events import JsonlReporter, RunEnded, RunStarted, StepTaken, Warned
from finetune.report.history import HistoryReader
from finetune.report.page import page as page_module
from finetune.report.page.facts import (
    AuditedSource,
    AuditSummary,
    config_lines,
)
from finetune.report.page.page import PageReporter, report_page
from finetune.report.reporter import FanOut
from tests.report.page.events import answered, ended, started, taken, whole_run, write_run

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror=hurt()>\u2028]]>{{ 7*7 }}' \" &lt;"


class Tags(HTMLParser):
    """Collects the tags of a page, and the text within scripts of data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def page_of(folder: Path, *, now: float = 2000.0) -> str:
    reader = HistoryReader(folder / "events.jsonl")
    reader.read_new()
    return report_page(folder, reader.history, now=now)


def without_library(page: str) -> str:
    """Return the page without plotly, which is large."""
    return re.sub(r"<script (?:nonce=|[^>]* id=.library).*?</script>", "", page, flags=re.DOTALL)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "first", [*whole_run(), answered(20, "5"), answered(40, "4")])
    (folder / "resolved.yaml").write_text(
        "# job.yaml\nrun:\n  seed: 42  # job.yaml line 3\n  strategy: null  # default\n"
    )
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    return page_of(folder)


def test_headline_figures_come_first(page: str):
    text = " ".join(" ".join(Tags(without_library(page)).texts).split())
    for figure in ("first finished", "steps 100 of 100", "evaluation exact_match 1.0000 highest 1.0000 at step 100"):
        assert figure in text
    assert text.index("tokens per second 800") < text.index("Answers over time")
    assert "training time 1 min 0 s" in text  # 100 steps of 0.5 s and 5 evaluations of 2 s
    assert "device hours 0.0167" in text


def test_charts_hold_the_curves_of_the_events(page: str):
    charts = {chart["title"]: chart for chart in data_of(page)["charts"]}
    assert {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "Evaluation: exact_match"} <= charts.keys()
    training, evaluation = charts["Loss"]["series"]
    assert (len(training["x"]), len(evaluation["x"])) == (100, 5)
    assert charts["Peak memory of rank 0"]["series"][0]["y"][0] == 1.07374  # GB


def test_a_step_is_known_in_tokens_and_seconds(page: str):
    (run,) = data_of(page)["runs"]
    assert run["scales"]["tokens"]["y"][-1] == 40_000
    assert run["scales"]["seconds"]["y"][-1] == 50 + 4 * 2


def test_config_has_its_sources(page: str):
    text = without_library(page)
    assert re.search(r'class="line set">  seed: 42  <span class="source">job.yaml line 3', text)
    assert re.search(r'class="line default">  strategy: null  <span class="source">default', text)


def test_missing_files_are_named(page: str):
    assert "Not found or damaged in the run folder: status.json, audit.json" in page


def test_the_report_page_fetches_nothing(page: str):
    tags = Tags(without_library(page)).tags
    assert len(tags) > 80
    assert not [
        tag for tag, attributes in tags if tag in ("link", "img", "iframe") or {"src", "href"} & attributes.keys()
    ]
    (policy,) = [each["content"] for tag, each in tags if tag == "meta" and "http-equiv" in each]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")


def test_hostile_text_stays_text(tmp_path: Path):
    events = [
        started(strategy=HOSTILE),
        taken(1, 1.0, metrics={HOSTILE: 1.0}),
        answered(1, HOSTILE, prompt=HOSTILE, reference=HOSTILE),
        {"event": "Warned", "time": 0, "step": 1, "message": HOSTILE},
        {"event": "Noted", "time": 0, "step": 1, "message": f"note {HOSTILE}"},
        {"event": "StepSkipped", "time": 0, "step": 1, "reason": HOSTILE, "sample_ids": [1], "rows": HOSTILE},
        ended(1, HOSTILE),
    ]
    folder = write_run(tmp_path / "run <b>", events)
    (folder / "resolved.yaml").write_text(f"key: {json.dumps(HOSTILE)}  # {HOSTILE}\n")
    (folder / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (folder / "audit.json").write_text(json.dumps({"sources": [{"key": HOSTILE, "counts": {}}]}))
    page = page_of(folder)
    tags = [tag for tag, _ in Tags(without_library(page)).tags]
    assert tags.count("script") == 1  # that of the data
    assert page.count("<script") - page.count('"<script') >= 3
    assert "img" not in tags
    assert "b" not in tags[tags.index("h1") : tags.index("h1") + 2]
    assert data_of(page)["runs"][0]["name"] == "run <b>"
    assert "{{ 7*7 }}" in page.replace("&#39;", "'")


def test_the_library_lies_in_the_page_compressed(page: str):
    packed = re.search(r'id="library">(.*?)</script>', page, re.DOTALL)[1]
    assert len(page) - len(packed) < 100_000
    library = gzip.decompress(base64.b64decode(packed)).decode()
    assert "plotly.js" in library[:200]
    assert len(library) > 2 * len(packed)


def test_images_are_not_called_tokens(tmp_path: Path):
    page = page_of(write_run(tmp_path, [started(config={"task": {"name": "image_classification"}}), taken(1, 1.0)]))
    assert "images per second" in page
    assert "Images per second" in {chart["title"] for chart in data_of(page)["charts"]}
    assert "tokens per second" not in page


def test_samples_of_a_skipped_step_are_folded(tmp_path: Path):
    skipped = {"event": "StepSkipped", "time": 0, "step": 1, "reason": "non-finite", "sample_ids": [7, 8]}
    page = page_of(write_run(tmp_path, [started(), taken(1, "nan"), {**skipped, "rows": "a.jsonl, rows 8 and 9"}]))
    assert "<details><summary>2 samples of step 1</summary>" in page
    assert "0 resumes; 1 skipped step<" in page


def test_invisible_characters_of_names_and_values_are_escapes_in_pages_and_charts(tmp_path: Path):
    hidden = "a\u202eb\u200bc\u2028d"
    evaluated = {"event": "Evaluated", "time": 3, "step": 1, "metrics": {"loss": 1.0, hidden: 2.0}, "seconds": 1.0}
    folder = write_run(tmp_path / hidden, [started(), taken(1, 1.0), evaluated])
    (folder / "resolved.yaml").write_text(f"x: {hidden[:5]}")
    page = page_of(folder)
    assert not {"\u202e", "\u200b", "\u2028"} & set(page)
    assert "x: a\\u202eb\\u200bc" in page and "<title>a\\u202eb\\u200bc\\u2028d" in page
    charts = json.dumps(data_of(page), ensure_ascii=False)
    assert not {"\u202e", "\u200b", "\u2028"} & set(charts) and r"a\\u202eb\\u200bc\\u2028d" in charts


def test_a_secret_in_a_config_is_redacted(tmp_path: Path):
    folder = write_run(tmp_path, [started()])
    (folder / "resolved.yaml").write_text('hub: "hf_abcdefghijklmnopqrstuvwxyz012345"  # job.yaml line 1\n')
    (folder / "environment.json").write_text('{"command": ["--set", "x=hf_abcdefghijklmnopqrstuvwxyz012345"]}')
    assert "hf_abcdefg" not in page_of(folder)


@pytest.mark.parametrize(
    "status, now, state",
    [
        ({"state": "running", "time": 1990.0}, 2000.0, "running"),
        ({"state": "running", "time": 1990.0}, 9000.0, "silent"),
        ({"state": "failed", "time": 1990.0, "error": {"rank": 1, "type": "Boom", "message": "no"}}, 9000.0, "failed"),
        ({}, 2000.0, "unknown"),
    ],
)
def test_the_state_is_that_of_the_run(tmp_path: Path, status: dict, now: float, state: str):
    folder = write_run(tmp_path, [started(), taken(1, 1.0)])
    (folder / "status.json").write_text(json.dumps(status))
    assert f'<span class="state {state}">' in page_of(folder, now=now)


def test_a_run_that_has_taken_no_step_has_a_page(tmp_path: Path):
    page = page_of(write_run(tmp_path, [started()]))
    assert data_of(page)["charts"] == []


def test_the_data_table_has_a_row_for_each_source():
    counts = {"rows": 10, "samples": 9, "tokens": 9000, "targets": 30, "long_rows": 1}
    head, row = AuditSummary(sources=[AuditedSource(key="data.train", counts=counts, duplicates=2)]).rows()
    assert dict(zip(head, row, strict=True)) == {
        **{"source": "data.train", "rows": "10", "samples": "9", "tokens": "9,000", "targets": "30"},
        **{"truncated rows": "0", "long rows": "1", "rows without target": "0", "longest": "0", "duplicates": "2"},
    }


def test_a_config_value_that_looks_like_a_source_is_not_parsed_as_one():
    (line,) = config_lines('  prompt: "a  # b"' + " " * 40 + "  # job.yaml line 7")
    assert (line.text, line.source, line.is_set) == ('  prompt: "a  # b"', "job.yaml line 7", True)


START = RunStarted(0, 100, "single on 1 process", ("batch: 64 = 1 process x 64",), {})
END = RunEnded(3, "finished", 3.0, {}, "final")


def reporters(folder: Path, **settings) -> FanOut:
    path = folder / "events.jsonl"
    return FanOut([JsonlReporter(path), PageReporter(path, **settings)])


def steps_in(folder: Path) -> int:
    page = (folder / "report.html").read_text()
    return int(page.partition("<small>steps</small><b>")[2].partition("<")[0].replace(",", ""))


def test_the_last_page_has_all_steps(tmp_path: Path, take_step):
    reporter = reporters(tmp_path)
    for event in (START, *(take_step(step) for step in (1, 2, 3)), END):
        reporter(event)
    reporter.close()
    assert steps_in(tmp_path) == 3
    assert '<span class="state finished">' in (tmp_path / "report.html").read_text()


def test_a_resumed_run_continues_the_page(tmp_path: Path, take_step):
    first = reporters(tmp_path)
    for event in (START, *(take_step(step) for step in (1, 2, 3))):
        first(event)
    first.close()  # as after a failure: nothing has said that the run is over
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "failed", "error": {"rank": 0, "type": "OSError", "message": "disk full"}})
    )
    second = reporters(tmp_path)
    second(RunStarted(2, 100, "single on 1 process", (), {}))
    second(take_step(3))
    second(take_step(4))
    second.close()
    assert steps_in(tmp_path) == 4
    assert "rank 0: OSError: disk full" in (tmp_path / "report.html").read_text()


def test_a_report_that_fails_is_a_warning(tmp_path: Path, take_step, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(page_module, "write_report", fail)
    seen = []
    reporter = FanOut([seen.append, PageReporter(tmp_path / "events.jsonl")])
    reporter(START)
    for thread in [each for each in threading.enumerate() if each.name == "report.html"]:
        thread.join()
    reporter(take_step(1))
    reporter(take_step(2))
    warnings = [event.message for event in seen if isinstance(event, Warned)]
    assert warnings == ["PageReporter failed and is disabled: OSError: no room"]
    assert [event.step for event in seen if isinstance(event, StepTaken)] == [1, 2]


def test_pages_are_rare(tmp_path: Path, take_step, monkeypatch: pytest.MonkeyPatch):
    written = []
    monkeypatch.setattr(page_module, "write_report", lambda *_: written.append(time.monotonic()))
    reporter = reporters(tmp_path, min_seconds=3600.0)
    reporter(START)
    for step in range(1, 2000):
        reporter(take_step(step))
    reporter.close()
    assert 1 <= len(written) <= 2  # at the start, and at the end


def test_a_run_without_events_has_no_page(tmp_path: Path):
    reporters(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
