"""The other adapters of peft give the same losses on one process, under DDP and FSDP2, also when a run moves."""

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


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory):
    """Launch the jobs of all types; return what each has left behind."""
    (case,) = (case for case in CASES if case.name == "adapters")
    folder: Path = tmp_path_factory.mktemp("peft")
    prepare([case], folder)

    def start(strategy: str | None, *more: str, name: str, types: tuple[str, ...] = tuple(TYPES)) -> dict[str, Left]:
        variants = {kind: (TYPES[kind], "export.verify=false", *more) for kind in types}
        changed = replace(case, variants=variants)
        left = launch(strategy, [(changed, kind) for kind in types], folder, name=name)
        return {kind: left[case.name, kind] for kind in types}

    start.folder, start.reload = folder / case.name, case.reload
    return start


@pytest.fixture(scope="module")
def straight(launched):
    return launched(None, name="straight")


@pytest.fixture(scope="module")
def moved(launched):
    """Runs that are begun under DDP on two ranks and resume under FSDP2."""
    launched("ddp", "train.stop_after_steps=2", name="moved")
    return launched("fsdp2", name="moved")


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_that_moves_from_ddp_to_fsdp2_has_the_losses_of_one_process(straight, moved, kind):
    assert straight[kind].error is None and moved[kind].error is None
    assert len(straight[kind].losses) == 4
    assert moved[kind].losses == pytest.approx(straight[kind].losses, rel=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_plain_peft_loads_what_fsdp2_has_exported(launched, moved, kind):
    assert launched.reload(moved[kind].final, launched.folder) == pytest.approx(moved[kind].metrics["loss"], rel=1e-4)


def test_types_that_merge_exactly_are_merged(launched):
    merged = launched(None, "export.merge=true", name="merged", types=EXACTLY_MERGED)
    for kind in EXACTLY_MERGED:
        assert merged[kind].error is None and not (merged[kind].final / "adapter_config.json").exists()
        loss = launched.reload(merged[kind].final, launched.folder)
        assert loss == pytest.approx(merged[kind].metrics["loss"], rel=1e-4)
