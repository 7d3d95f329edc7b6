"""Every task finds its microbatch size and trains as with the size that is written."""

from dataclasses import replace

import pytest

from tests.scenarios.test_every_task import VARIANT, variant_of
from tests.task_cases import CASES
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

AUTO = ("train.microbatch_size=auto",)
SHORT = ("train.steps=3", "export.verify=false")
TASKS = [case for case in CASES if not case.is_extra and "by: tokens" not in case.job and "in_backward" not in case.job]

SPREAD = ("dpo", "embedding")
"""Tasks that look at the other microbatches of a step or at other ranks; they run under every strategy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("auto")
    prepare(TASKS, place)
    return place


@pytest.mark.parametrize("strategy", ["single", *VARIANT])
def test_every_task_trains_alike_with_auto(folder, strategy):
    tasks = [case for case in TASKS if strategy == "single" or case.name in SPREAD]
    pairs = [(case, variant_of(case, strategy) if strategy in VARIANT else next(iter(case.variants))) for case in tasks]
    runs = [
        (replace(case, variants={name: (*case.variants[variant], *SHORT, *size)}), name)
        for case, variant in pairs
        for name, size in (("written", ()), ("auto", AUTO))
    ]
    left = launch(None if strategy == "single" else strategy, runs, folder, name=strategy)
    failed = {}
    for case in tasks:
        written, auto = left[case.name, "written"], left[case.name, "auto"]
        if auto.error is not None or not written.losses or auto.losses != pytest.approx(written.losses, rel=1e-4):
            failed[case.name] = auto.error or (written.losses, auto.losses)
    assert not failed
    assert (folder / f"{strategy}.log").read_text().count("microbatch_size: auto: ") == len(tasks)
