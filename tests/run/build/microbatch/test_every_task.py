"""Every task finds its microbatch size and trains as with the size that is written."""

from dataclasses import replace

import pytest

from tests.run.test_every_task import VARIANT, variant_of
from tests.task_cases import CASES
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]

AUTO = ("train.microbatch_size=auto",)
TASKS = [case for case in CASES if not case.is_extra and "by: tokens" not in case.job and "in_backward" not in case.job]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("auto")
    prepare(TASKS, place)
    return place


@pytest.mark.parametrize("strategy", ["single", *VARIANT])
def test_every_task_trains_alike_with_auto(folder, strategy):
    chosen = [
        (case, variant_of(case, strategy) if strategy in VARIANT else next(iter(case.variants))) for case in TASKS
    ]
    pairs = [(case, each) for case, each in chosen if (each, strategy) not in case.exempt]
    found = [
        (replace(case, variants={f"{each}-auto": (*case.variants[each], *AUTO)}), f"{each}-auto")
        for case, each in pairs
    ]
    left = launch(None if strategy == "single" else strategy, [*pairs, *found], folder, name=strategy)
    failed = {}
    for case, each in pairs:
        written, auto = left[case.name, each], left[case.name, f"{each}-auto"]
        if auto.error is not None or auto.losses != pytest.approx(written.losses, rel=1e-4):
            failed[case.name] = auto.error or (written.losses, auto.losses)
    assert not failed
    assert (folder / f"{strategy}.log").read_text().count("microbatch_size: auto: ") == len(pairs)
