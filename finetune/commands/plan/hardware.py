"""The machines of a plan: from `--gpus`, this machine, or a list of common ones."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finetune.commands.plan.assumptions import (
    FP8_SAVED_SHARE,
    GPUS_PER_NODE,
    HOP_SECONDS,
    LINK_SHARE,
    NETWORK_SHARE,
    TRAINING_SHARE,
    USABLE_SHARE,
)
from finetune.commands.plan.step_time import Cluster, Device
from finetune.errors import UserError
from finetune.runtime.gpus import GpuModel, find_gpu, require_gpu

COMMON_HARDWARE = ("1xRTX4090", "1xA100-80GB", "8xA100-80GB", "8xH100-80GB")
"""The machines of a plan without `--gpus` on a machine without a GPU."""


_MAX_GPUS = 1 << 16


@dataclass(frozen=True)
class Hardware:
    """GPUs of one model, on one or several machines."""

    gpu: GpuModel
    gpus_per_node: int
    num_nodes: int = 1

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of all machines."""
        return self.gpus_per_node * self.num_nodes

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of one GPU's memory that a step may use."""
        return int(self.gpu.memory_bytes * USABLE_SHARE)

    @property
    def cluster(self) -> Cluster:
        """Return the ranks with their effective bandwidths."""
        gpu = self.gpu
        return Cluster(
            num_ranks=self.num_gpus,
            ranks_per_node=self.gpus_per_node,
            link_bandwidth=gpu.link_bandwidth * LINK_SHARE.get(gpu.link, LINK_SHARE["PCIe"]),
            network_bandwidth=gpu.network_bandwidth * NETWORK_SHARE,
            hop_seconds=HOP_SECONDS.get(gpu.link, HOP_SECONDS["PCIe"]),
        )

    def device(self, dtype: str, *, fp8_share: float = 0.0) -> Device:
        """Return the effective speed of one GPU in this data type, and in 8 bits for this share of the FLOPs."""
        gpu = self.gpu
        saved = fp8_share * FP8_SAVED_SHARE if "fp8" in gpu.flops else 0.0
        return Device(
            flops=gpu.peak_flops(dtype) * gpu.matmul_share * TRAINING_SHARE / (1 - saved),
            memory_bandwidth=gpu.memory_bandwidth,
            pcie_bandwidth=gpu.pcie_bandwidth,
            attention_share=gpu.attention_share,
        )

    def with_gpus(self, num_gpus: int) -> "Hardware":
        """Return this number of GPUs of the same model: on one machine if they fit, else on whole machines."""
        per_node = max(self.gpus_per_node, min(num_gpus, GPUS_PER_NODE))
        if num_gpus <= per_node:
            return replace(self, gpus_per_node=num_gpus, num_nodes=1)
        return replace(self, gpus_per_node=per_node, num_nodes=-(-num_gpus // per_node))

    def __str__(self) -> str:
        several = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        return f"{several}{self.gpus_per_node}x {self.gpu.name}"


def parse_hardware(
    text: str, *, num_nodes: int | None, gpu_table: Path | None = None, network_gbit: float | None = None
) -> Hardware:
    """Return the machines of a text such as `8xH100-80GB`; raises UserError.

    Each of the `num_nodes` machines has this number of GPUs; None: one machine, or machines with 8 GPUs each if there
    are more. `network_gbit` replaces the table's network bandwidth, in Gbit/s per machine.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?([^\s].*?)\s*", text)
    count, name = (match[1], match[2]) if match is not None else (None, text)
    number = 1 if count is None else int(count[:9])
    if match is None or not 1 <= number <= _MAX_GPUS:
        raise UserError(f"--gpus: `{text}` is not of the form NxGPU with 1 to {_MAX_GPUS:,} GPUs. Write `8xH100-80GB`.")
    gpu = require_gpu(name, table=gpu_table)
    if num_nodes is None and number > GPUS_PER_NODE:
        if number % GPUS_PER_NODE:
            raise UserError(
                f"--gpus: {number} GPUs cannot be divided among machines with 8 each. Add --nodes N and write `8xGPU`."
            )
        number, num_nodes = GPUS_PER_NODE, number // GPUS_PER_NODE
    if network_gbit is not None:
        gpu = replace(gpu, network_bandwidth=network_gbit * 1e9 / 8 / number)
    return Hardware(gpu, number, num_nodes or 1)


def own_hardware(*, num_nodes: int | None, gpu_table: Path | None) -> Hardware | None:
    """Return the GPUs of this machine; None without a GPU. Raises UserError for an unknown GPU."""
    if not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpu = find_gpu(names[0], table=gpu_table)
    if gpu is None:
        raise UserError(
            f"the GPU of this machine, {names[0]}, is not in the table. Write --gpus with a similar one, or describe "
            "it in a file: --gpu-table FILE."
        )
    if len(set(names)) > 1:
        raise UserError(
            f"this machine has GPUs of several models ({', '.join(sorted(set(names)))}). Write --gpus with the one "
            "for the job."
        )
    total = torch.cuda.get_device_properties(0).total_memory
    return Hardware(replace(gpu, memory_bytes=total), len(names), num_nodes or 1)
