"""The other adapters, optimizers and losses train alike on one process, under DDP and FSDP2, also when a run moves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.task_cases import CASES
from tests.task_cases.runs import Left, launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

TARGETS = "target_modules: [q_proj, v_proj]"
TYPES = {
    "loha": f"model.peft={{type: loha, values: {{r: 4, alpha: 8, {TARGETS}}}}}",
    "lokr": f"model.peft={{type: lokr, values: {{r: 4, alpha: 8, {TARGETS}}}}}",
    "vera": f"model.peft={{type: vera, values: {{r: 8, {TARGETS.replace('v_proj', 'o_proj')}}}}}",
    "boft": f"model.peft={{type: boft, values: {{boft_block_size: 8, {TARGETS}}}}}",
}
EXACTLY_MERGED = ("loha", "lokr")
RATE = "train.learning_rate=1e-4"
JOBS = {
    **{name: ("adapters", (setting,)) for name, setting in TYPES.items()},
    "lion": ("groups", ("train.optimizer={name: lion, weight_decay: 0.1}", RATE)),
    "apo_zero": ("dpo", ("task={name: preference, preference: {loss: apo_zero, beta: 0.5}}", RATE)),
}
"""From a name to a case and what makes it use the adapter, the optimizer or the loss."""

OF_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("moved")
    prepare([OF_NAME[name] for name in {case for case, _ in JOBS.values()}], place)
    return place


@pytest.fixture(scope="module")
def launched(folder):
    """Return a function that launches jobs and returns what each has left behind."""

    def start(strategy: str | None, *more: str, name: str, jobs: tuple[str, ...] = tuple(JOBS)) -> dict[str, Left]:
        runs = []
        for job in jobs:
            case, settings = JOBS[job]
            runs.append((replace(OF_NAME[case], variants={job: (*settings, "export.verify=false", *more)}), job))
        return {job: left for (_, job), left in launch(strategy, runs, folder, name=name).items()}

    return start


@pytest.fixture(scope="module")
def straight(launched):
    return launched(None, name="straight")


@pytest.fixture(scope="module")
def moved(launched):
    """Runs that are begun under DDP on two ranks and resume under FSDP2."""
    launched("ddp", "train.stop_after_steps=2", name="moved")
    return launched("fsdp2", name="moved")


def loss_of_the_export(left: Left, folder: Path) -> float:
    """Return the loss that plain peft and transformers compute with what was exported."""
    return OF_NAME["adapters"].reload(left.final, folder / "adapters")


@pytest.mark.parametrize("job", JOBS)
def test_a_run_that_moves_from_ddp_to_fsdp2_has_the_losses_of_one_process(straight, moved, job):
    assert straight[job].error is None and moved[job].error is None
    assert len(straight[job].losses) == 4
    assert moved[job].losses == pytest.approx(straight[job].losses, rel=1e-4)
    assert moved[job].metrics == pytest.approx(straight[job].metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_plain_peft_loads_what_fsdp2_has_exported(folder, moved, kind):
    assert loss_of_the_export(moved[kind], folder) == pytest.approx(moved[kind].metrics["loss"], rel=1e-4)


def test_types_that_merge_exactly_are_merged(folder, launched):
    merged = launched(None, "export.merge=true", name="merged", jobs=EXACTLY_MERGED)
    for kind in EXACTLY_MERGED:
        assert merged[kind].error is None and not (merged[kind].final / "adapter_config.json").exists()
        assert loss_of_the_export(merged[kind], folder) == pytest.approx(merged[kind].metrics["loss"], rel=1e-4)
