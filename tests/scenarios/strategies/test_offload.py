"""FSDP2 with parameters on the CPU: its losses, and the first log line, whose numbers come from two devices."""

import pytest

from tests.devices import ON_GPU
from tests.launching import ROOT

pytestmark = [*ON_GPU, pytest.mark.distributed]  # without a GPU there is nothing to offload from, and torch refuses

JOB = [
    "train.steps=4",
    "train.microbatch_size=2",
    "evaluate=null",
    "data.validation=null",
    "checkpoint.every_steps=null",
]


@pytest.fixture(scope="module")
def offloading(tmp_path_factory):
    """An accelerate config as fsdp2.yaml, with parameters on the CPU."""
    written = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    changed = written.replace("fsdp_offload_params: false", "fsdp_offload_params: true")
    assert changed != written
    path = tmp_path_factory.mktemp("configs") / "offload.yaml"
    path.write_text(changed)
    return str(path.with_suffix(""))


def test_offloaded_parameters_train_as_others_and_each_step_is_logged(launch, offloading, figure):
    runs = [
        launch(strategy, name=name, processes=1, overrides=JOB)
        for name, strategy in (("plain", "fsdp2"), ("offloaded", offloading))
    ]
    for run in runs:
        assert run.code == 0, run.output
    plain, offloaded = runs
    assert len(offloaded.losses()) == 4
    assert offloaded.norms() == pytest.approx(plain.norms(), rel=1e-3)
    difference = max(abs(one - other) for one, other in zip(offloaded.losses(), plain.losses(), strict=True))
    figure("fsdp2 with offloaded parameters: difference of losses", difference, at_most=1e-4)
