"""Padded and end to end, every task has the same losses, norms and metrics under a sharding strategy."""

from dataclasses import replace

import pytest

from finetune.report.history import read_events
from tests.scenarios.conftest import samples_by_step
from tests.task_cases import CASES
from tests.task_cases.runs import Left, launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

TASKS = ("text_classification", "decoder_classification", "token_classification", "masked_lm", "reward", "dpo", "kto")
LAYOUTS = {"padded": ("data.batching.padding_free=false",), "rows": ("data.batching.padding_free=true",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


def test_a_layout_changes_no_loss(folder):
    cases = [replace(case, variants=LAYOUTS) for case in CASES if case.name in TASKS]
    assert len(cases) == len(TASKS)
    prepare(cases, folder)
    left = launch("fsdp2", [(case, layout) for case in cases for layout in LAYOUTS], folder)
    for case in cases:
        padded, rows = (left[case.name, layout] for layout in LAYOUTS)
        assert rows.error is None and padded.error is None, rows.error or padded.error
        assert len(rows.losses) >= 4
        assert rows.losses == pytest.approx(padded.losses, rel=1e-5), case.name
        assert norms_of(rows) == pytest.approx(norms_of(padded), rel=1e-4), case.name
        assert rows.metrics == pytest.approx(padded.metrics, rel=1e-4, abs=1e-6), case.name


AS_BEFORE = ("data.batching.padding_free=false", "data.batching.length_window_steps=0", "report.sample_ids=true")


def test_a_run_of_padded_random_batches_resumes_packed_or_sorted_with_the_same_samples(folder):
    """As a checkpoint of a version that padded these tasks does: same samples of each step, same losses."""
    names = ("text_classification", "masked_lm", "dpo", "seq2seq")
    runs = {name: folder / "resumed" / name for name in names}
    cases = [
        replace(
            case,
            variants={
                "straight": AS_BEFORE,
                "stopped": (*AS_BEFORE, f"run.folder={runs[case.name]}", "train.stop_after_steps=2"),
                "resumed": (f"run.folder={runs[case.name]}", "report.sample_ids=true"),
            },
        )
        for case in CASES
        if case.name in names
    ]
    prepare([case for case in cases if not (folder / case.name).exists()], folder)
    left = launch(None, [(case, variant) for case in cases for variant in case.variants], folder)
    for case in cases:
        straight, resumed = left[case.name, "straight"], Left(runs[case.name])
        assert resumed.error is None, resumed.error
        assert len(resumed.losses) == len(straight.losses) >= 4
        assert resumed.losses == pytest.approx(straight.losses, rel=1e-5), case.name
        assert samples_by_step(resumed.folder) == samples_by_step(straight.folder)


def norms_of(left):
    events = read_events(left.folder / "events.jsonl")
    return [float(event["gradient_norm"]) for event in events if event["event"] == "StepTaken"]
