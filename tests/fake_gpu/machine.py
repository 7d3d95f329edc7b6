"""Machines with GPUs by their recorded facts, and what torch answers on them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from finetune.model.kernels import fused_layers
from finetune.task.lm_loss import chunked_loss
from tests.fake_gpu.device import FakeGpu
from tests.fake_gpu.streams import DEFAULT, HOST, FakeEvent, FakeStream, Timeline


@dataclass(frozen=True)
class Machine:
    """A kind of GPU as torch and the driver describe it, and the host that it usually comes with."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int  # torch.cuda.get_device_properties(0).total_memory
    num_multiprocessors: int
    cores_per_gpu: int


MACHINES = {
    "H100": Machine("NVIDIA H100 80GB HBM3", (9, 0), 85_017_493_504, 132, 26),
    "A100": Machine("NVIDIA A100-SXM4-80GB", (8, 0), 85_097_971_712, 108, 12),
    "RTX4090": Machine("NVIDIA GeForce RTX 4090", (8, 9), 25_386_352_640, 128, 16),
    "T4": Machine("Tesla T4", (7, 5), 15_655_829_504, 40, 4),
}


_WITHOUT_EFFECT = (
    "_lazy_call",
    "_lazy_init",
    "empty_cache",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
)


@contextmanager
def on_machine(gpu: FakeGpu, machine: Machine, *, num_gpus: int = 1) -> Iterator[Timeline]:
    """Have torch describe this machine, with streams on the timeline that is yielded."""
    timeline = Timeline()
    event = type("Event", (FakeEvent,), {"timeline": timeline})
    stream = type("Stream", (FakeStream,), {"timeline": timeline, "event": event})
    default = stream(name=DEFAULT)
    streams = {DEFAULT: default}
    gpu.timeline = timeline

    def current_stream(*_: Any) -> FakeStream:
        return streams.setdefault(timeline.current, stream(name=timeline.current))

    def synchronize(*_: Any) -> None:
        gpu.report("torch.cuda.synchronize", "waits for the GPU")
        for clock in list(timeline.clocks.values()):
            timeline.wait(HOST, clock)

    major, minor = machine.capability
    properties = SimpleNamespace(
        name=machine.name,
        major=major,
        minor=minor,
        total_memory=machine.memory_bytes,
        multi_processor_count=machine.num_multiprocessors,
        uuid="GPU-0",
        warp_size=32,
        gcnArchName="",
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=101376,
    )
    nothing = dict.fromkeys(_WITHOUT_EFFECT, lambda *_, **__: None)
    answers: dict[str, Any] = {
        **nothing,
        "is_available": lambda: True,
        "device_count": lambda: num_gpus,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: machine.name,
        "get_device_capability": lambda *_: machine.capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (machine.memory_bytes - (500 << 20), machine.memory_bytes),
        "is_bf16_supported": lambda *_, **__: True,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "memory_allocated": lambda *_: 1 << 30,
        "max_memory_allocated": lambda *_: 1 << 30,
        "memory_reserved": lambda *_: 1 << 30,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "Stream": stream,
        "Event": event,
        "current_stream": current_stream,
        "default_stream": lambda *_: default,
        "set_stream": lambda each: None,
        "stream": lambda each: each,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register(gpu), cudaHostUnregister=lambda _: 0),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name, answer in {
            "is_available": lambda: True,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "device_count": lambda: num_gpus,
            "current_device_index": lambda: 0,
            "set_device_index": lambda _: None,
            "synchronize": synchronize,
            "current_stream": current_stream,
        }.items():
            stack.enter_context(patch.object(torch.accelerator, name, answer))
        stack.enter_context(patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")))
        stack.enter_context(patch.object(torch, "Event", event))
        stack.enter_context(patch.object(torch, "Stream", stream))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *given: gpu.record_stream(*given)))
        stack.enter_context(_autocast())
        # fused layers are chosen where liger-kernel is installed, and compute with the model's own operations
        stack.enter_context(patch.object(fused_layers, "missing_kernel_requirement", lambda device_type: None))
        stack.enter_context(patch.object(fused_layers, "runs_kernels", lambda device_type: False))
        stack.enter_context(patch.object(chunked_loss, "runs_fused", lambda *_: False))
        stack.enter_context(patch.object(os, "cpu_count", lambda: machine.cores_per_gpu * num_gpus))
        yield timeline


def _register(gpu: FakeGpu) -> Any:
    def register(address: int, size_bytes: int, flags: int) -> int:
        gpu.registered.append((address, size_bytes))
        return 0

    return register


@contextmanager
def _autocast() -> Iterator[None]:
    """Autocast the tensors, which are the CPU's in truth, where the GPU's are to be cast."""
    mode = torch.amp.autocast_mode.autocast
    begin, enabled, dtype = mode.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def here(device_type: str) -> str:
        return "cpu" if device_type == "cuda" else device_type

    def begin_here(self: Any, device_type: str, *given: Any, **named: Any) -> None:
        begin(self, here(device_type), *given, **named)

    with (
        patch.object(mode, "__init__", begin_here),
        patch.object(torch, "is_autocast_enabled", lambda device_type="cpu": enabled(here(device_type))),
        patch.object(torch, "get_autocast_dtype", lambda device_type: dtype(here(device_type))),
    ):
        yield
