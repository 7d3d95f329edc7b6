"""A GPU's memory is kept in segments that grow, unless the user, or the machine, wants it otherwise."""

import ctypes
import json

import pytest

from finetune.run import start
from finetune.run.start import ALLOC_CONF, EXPANDABLE, use_expandable_segments
from tests.devices import SELDOM_ON_CPU


class Driver:
    """In the place of libcuda: GPUs that can map memory, or not."""

    def __init__(self, *can_map: int, error: int = 0) -> None:
        self.can_map, self.error = can_map, error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, number):
        number._obj.value = len(self.can_map)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute == 102
        value._obj.value = self.can_map[device.value]
        return 0


@pytest.mark.parametrize(
    ("driver", "variables", "expected"),
    [
        (Driver(1, 1), {}, {ALLOC_CONF: EXPANDABLE}),
        (Driver(1, 0), {}, {}),
        (Driver(), {}, {}),
        (Driver(1, error=100), {}, {}),
        (Driver(1), {"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
        (Driver(1), {ALLOC_CONF: "max_split_size_mb:64"}, {ALLOC_CONF: "max_split_size_mb:64"}),
        (Driver(1), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ],
)
def test_expandable_segments_are_enabled_if_every_gpu_supports_them_and_nothing_is_set(
    monkeypatch, driver, variables, expected
):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(start.sys, "platform", "linux")
    monkeypatch.setattr(start.sys, "modules", {})
    assert use_expandable_segments(variables) is (variables.get(ALLOC_CONF) == EXPANDABLE)
    assert variables == expected


@pytest.mark.distributed
@SELDOM_ON_CPU
def test_the_allocator_setting_is_recorded_in_the_environment_of_the_run(launch, device, monkeypatch):
    for name in (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    run = launch(None, name=f"allocator-{device}", overrides=["train.steps=4", "evaluate=null", "data.validation=null"])
    assert run.code == 0, run.output
    variables = json.loads((run.folder / "environment.json").read_text())["launcher"]
    assert variables.get(ALLOC_CONF) == (EXPANDABLE if device == "cuda" else None)
