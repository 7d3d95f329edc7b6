"""Utilization, power, temperature and memory of this rank's GPU, read once a second in the background."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

INTERVAL_SECONDS = 1.0

_READERS: Mapping[str, tuple[Callable[[torch.device], int], float]] = {
    "gpu_utilization": (torch.cuda.utilization, 0.01),
    "gpu_power_watts": (torch.cuda.power_draw, 0.001),
    "gpu_temperature_celsius": (torch.cuda.temperature, 1.0),
    "gpu_memory_used_bytes": (torch.cuda.device_memory_used, 1.0),
}
"""Torch's function for each column, and the factor from its unit to the column's."""

COLUMNS = tuple(_READERS)
"""The possible names in `StepTaken.device`."""


class DeviceColumns:
    """The latest values of a device by name; none without a GPU that torch can read."""

    columns: Mapping[str, float] = {}


def read_gpu(device: torch.device) -> dict[str, float]:
    """Return the values that the GPU reports; none without NVML or its driver, and none of a GPU that is lost."""
    columns: dict[str, float] = {}
    for name, (read, factor) in _READERS.items():
        with suppress(Exception):  # NVML's and torch's errors share no class
            columns[name] = factor * read(device)
    return columns


@contextmanager
def sampled_gpu(device: torch.device, *, is_main: bool) -> Iterator[DeviceColumns]:
    """Sample this rank's GPU meanwhile, on the main rank, whose events are written."""
    sampled, is_over = DeviceColumns(), threading.Event()
    if not is_main or device.type != "cuda":
        yield sampled
        return

    def sample() -> None:
        while not is_over.is_set():
            sampled.columns = read_gpu(device)
            is_over.wait(INTERVAL_SECONDS)

    thread = threading.Thread(target=sample, name="gpu-sampler", daemon=True)
    thread.start()
    try:
        yield sampled
    finally:
        is_over.set()
        thread.join(timeout=2 * INTERVAL_SECONDS)
