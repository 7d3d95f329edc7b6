"""Every Triton kernel that a run can launch is compiled for four generations of GPUs; none spills registers."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

import compiled_kernels

pytestmark = pytest.mark.full

KERNELS = {
    "rms_norm_forward_kernel",
    "rms_norm_backward_kernel",
    "swiglu_forward_kernel",
    "swiglu_backward_kernel",
    "geglu_tanh_forward_kernel",
    "geglu_tanh_backward_kernel",
    "triton_rope",
    "update",
}


def test_no_kernel_spills_registers_on_any_generation_of_gpus():
    launches = compiled_kernels.recorded_launches()
    assert {launch.name for launch in launches} == KERNELS
    used = {
        f"{number} {launch.name} sm_{capability}": compiled_kernels.compiled(launch, capability)
        for number, launch in enumerate(launches)
        for capability in compiled_kernels.CAPABILITIES
    }
    assert {name: usage for name, usage in used.items() if usage.spilled_bytes} == {}
