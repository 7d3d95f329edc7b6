"""`model.kernels: liger` in whole runs under a sharding strategy, on a CPU in Triton's interpreter."""

from pathlib import Path

import pytest

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="triton is not installed")

INTERPRETER = Path(__file__).parents[1] / "model/kernels/triton_on_cpu.py"
ALONE = [
    "train.steps=2",
    "train.schedule.warmup_steps=1",
    "checkpoint.every_steps=null",
    "evaluate=null",
    "data.validation=null",
    "export.verify=false",
]
FEW = [*ALONE, "train.global_batch_size=4", "train.microbatch_size=1"]
LORA = "model.lora={rank: 4, alpha: 8, dropout: 0.1}"


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_with_kernels_has_the_losses_of_the_run_without(launch):
    plain = launch("fsdp2", name="kernels-none", overrides=[*FEW, LORA])
    fused = launch(
        "fsdp2",
        name="kernels-liger",
        overrides=[*FEW, LORA, "model.kernels=liger", f"plugins=[{INTERPRETER}]"],
        environment={"TRITON_INTERPRET": "1"},
        is_cold=True,
    )
    assert plain.code == fused.code == 0, fused.output
    assert "kernels of liger-kernel: " in fused.output and "kernels of liger-kernel: " not in plain.output
    assert fused.losses() == pytest.approx(plain.losses(), abs=1e-5)
    assert fused.norms() == pytest.approx(plain.norms(), rel=1e-4)


def test_kernels_that_this_machine_cannot_run_are_refused(launch):
    run = launch(None, name="kernels-cpu", overrides=[*ALONE, "model.kernels=liger"])
    assert run.code == 2
    assert "model.kernels: `liger` needs a CUDA GPU, and this run is on `cpu`." in run.output
