"""The machines that a plan is for: those of `--gpus`, this machine, or a list of common ones."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finetune.commands.plan.cost.assumptions import (
    GPUS_PER_NODE,
    HOP_SECONDS,
    LINK_SHARE,
    NETWORK_SHARE,
    TRAINING_SHARE,
    USABLE_SHARE,
)
from finetune.commands.plan.cost.collectives import Cluster
from finetune.commands.plan.cost.step_time import Device
from finetune.errors import UserError
from finetune.runtime.gpus.specifications import GpuKind, find_gpu, require_gpu

USUAL_HARDWARE = ("1xRTX4090", "1xA100-80GB", "8xA100-80GB", "8xH100-80GB")
"""The machines of a plan that is made on a machine without a GPU and without `--gpus`."""


_MAX_GPUS = 1 << 16


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind, on one or several machines."""

    kind: GpuKind
    gpus_per_node: int
    num_nodes: int = 1
    slowdown: float = 1.0  # by which an earlier run of the job took longer than the cost model says

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of all machines."""
        return self.gpus_per_node * self.num_nodes

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of one GPU's memory that a step may use."""
        return int(self.kind.memory_bytes * USABLE_SHARE)

    @property
    def cluster(self) -> Cluster:
        """Return the ranks with their effective bandwidths."""
        kind = self.kind
        return Cluster(
            num_ranks=self.num_gpus,
            ranks_per_node=self.gpus_per_node,
            link_bandwidth=kind.link_bandwidth * LINK_SHARE.get(kind.link, LINK_SHARE["PCIe"]),
            network_bandwidth=kind.network_bandwidth * NETWORK_SHARE,
            hop_seconds=HOP_SECONDS.get(kind.link, HOP_SECONDS["PCIe"]),
        )

    def device(self, dtype: str) -> Device:
        """Return the effective pace of one GPU that computes in this data type."""
        kind = self.kind
        flops = kind.peak_flops(dtype) * kind.matmul_share * TRAINING_SHARE / self.slowdown
        memory = kind.memory_bandwidth / self.slowdown
        return Device(flops=flops, memory_bandwidth=memory, pcie_bandwidth=kind.pcie_bandwidth)

    def with_gpus(self, num_gpus: int) -> "Hardware":
        """Return this number of GPUs of the same kind: on one machine if they fit there, else on whole machines."""
        per_node = max(self.gpus_per_node, min(num_gpus, GPUS_PER_NODE))
        if num_gpus <= per_node:
            return replace(self, gpus_per_node=num_gpus, num_nodes=1)
        return replace(self, gpus_per_node=per_node, num_nodes=-(-num_gpus // per_node))

    def __str__(self) -> str:
        several = f"{self.num_nodes} machines with " if self.num_nodes > 1 else ""
        return f"{several}{self.gpus_per_node}x {self.kind.name}"


def parse_hardware(
    text: str, *, num_nodes: int | None, gpu_table: Path | None = None, network_gbit: float | None = None
) -> Hardware:
    """Return the machine that a text such as `8xH100-80GB` names; raises UserError.

    `num_nodes` machines have that many GPUs each; None: one machine, or as many as 8 GPUs each make of more than 8.
    `network_gbit` replaces the table's network bandwidth, in Gbit/s of each machine.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?([^\s].*?)\s*", text)
    count, name = (match[1], match[2]) if match is not None else (None, text)
    number = 1 if count is None else int(count[:9])
    if match is None or not 1 <= number <= _MAX_GPUS:
        raise UserError(f"--gpus: `{text}` is not of the form NxGPU with 1 to {_MAX_GPUS:,} GPUs. Write `8xH100-80GB`.")
    kind = require_gpu(name, table=gpu_table)
    if num_nodes is None and number > GPUS_PER_NODE:
        if number % GPUS_PER_NODE:
            raise UserError(f"--gpus: {number} GPUs are not on machines with 8 each. Add --nodes N and write `8xKIND`.")
        number, num_nodes = GPUS_PER_NODE, number // GPUS_PER_NODE
    if network_gbit is not None:
        kind = replace(kind, network_bandwidth=network_gbit * 1e9 / 8 / number)
    return Hardware(kind, number, num_nodes or 1)


def own_hardware(*, num_nodes: int | None, gpu_table: Path | None) -> Hardware | None:
    """Return the GPUs of this machine; None without a GPU. Raises UserError for one that is in no table."""
    if not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kind = find_gpu(names[0], table=gpu_table)
    if kind is None:
        raise UserError(
            f"the GPU of this machine, {names[0]}, is not in the table. Write --gpus with a similar one, or describe "
            "it in a file: --gpu-table FILE."
        )
    if len(set(names)) > 1:
        raise UserError(
            f"this machine has GPUs of several kinds ({', '.join(sorted(set(names)))}). Write --gpus with the one that "
            "the job will run on."
        )
    total = torch.cuda.get_device_properties(0).total_memory
    return Hardware(replace(kind, memory_bytes=total), len(names), num_nodes or 1)
