"""The table of GPU kinds: memory, peak FLOP/s by data type, and bandwidths, from the vendors' datasheets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.gpus.table import read_table

_OWN_TABLE = Path(__file__).with_name("specifications.yaml")

_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct)\b")
_NUM_NAMES = 6


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU. Bandwidths are bytes per second; those of links are of one direction.

    `flops` is the dense peak per second by "bf16", "fp16", "tf32" and "fp32"; a data type that the device lacks is not
    among them. `link` is how the GPUs of one machine are connected.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    pcie_bandwidth: float
    network_bandwidth: float  # of one GPU to other machines
    watts: float
    matmul_share: float  # of the peak, that large matrix products reach
    names: tuple[str, ...]
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Return the peak in this data type; that of fp32 where the device lacks it."""
        return self.flops.get(dtype, self.flops["fp32"])


def find_gpu(name: str, *, table: Path | None = None) -> GpuKind | None:
    """Return the kind of GPU that torch, nvidia-smi or a user calls so; None for one that is in no table.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("a100-40gb").name, find_gpu("RTX 4090 Laptop GPU")
    ('H100-80GB', 'A100-40GB', None)
    """
    wanted = _normalized(name)
    for kind in gpu_kinds(table):
        if wanted in {_normalized(each) for each in (kind.name, *kind.names)}:
            return kind
    return None


def require_gpu(name: str, *, table: Path | None = None, place: str = "--gpus") -> GpuKind:
    """Return the kind of this name, which is written at `place`; raises UserError that lists the nearest names."""
    kind = find_gpu(name, table=table)
    if kind is not None:
        return kind
    raise UserError(
        f"{place}: there is no GPU `{name}` in the table. Nearest: {', '.join(nearest_names(name, table=table))}. "
        "A kind that is missing can be described in a file of your own: --gpu-table FILE."
    )


def nearest_names(name: str, *, table: Path | None = None) -> list[str]:
    """Return the names of the table that are most like this one, the most likely first; never an empty list."""
    by_name = {_normalized(each): kind.name for kind in gpu_kinds(table) for each in (kind.name, *kind.names)}
    close = get_close_matches(_normalized(name), list(by_name), n=_NUM_NAMES, cutoff=0.5)
    return list(dict.fromkeys(by_name[each] for each in close)) or [kind.name for kind in gpu_kinds(table)]


def gpu_kinds(table: Path | None = None) -> Sequence[GpuKind]:
    """Return all kinds: those of the user's file first, then those of the package. Raises UserError."""
    return (*(_read(table) if table is not None else ()), *_read(_OWN_TABLE))


@cache
def _read(path: Path) -> tuple[GpuKind, ...]:
    return tuple(_kind(name, values, path) for name, values in read_table(path).items())


_KEYS = (
    "memory_gib",
    "tflops",
    "memory_gbps",
    "link",
    "link_gbps",
    "pcie_gbps",
    "network_gbps",
    "watts",
    "matmul_share",
    "names",
    "source",
)


def _kind(name: str, values: Any, path: Path) -> GpuKind:
    if not isinstance(values, dict) or sorted(values) != sorted(_KEYS):
        raise UserError(f"{path}: the entry `{name}` must have exactly the keys {', '.join(_KEYS)}.")
    try:
        return GpuKind(
            name=name,
            memory_bytes=round(float(values["memory_gib"]) * 2**30),
            flops={dtype: float(number) * 1e12 for dtype, number in {"fp32": None, **values["tflops"]}.items()},
            memory_bandwidth=float(values["memory_gbps"]) * 1e9,
            link=str(values["link"]),
            link_bandwidth=float(values["link_gbps"]) * 1e9,
            pcie_bandwidth=float(values["pcie_gbps"]) * 1e9,
            network_bandwidth=float(values["network_gbps"]) * 1e9,
            watts=float(values["watts"]),
            matmul_share=float(values["matmul_share"]),
            names=tuple(str(each) for each in values["names"]),
            source=str(values["source"]),
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path}: the entry `{name}` has a value of the wrong type ({error}). `tflops` needs at least fp32."
        ) from None


def _normalized(name: str) -> str:
    """Return the name without what differs between those who write it: `NVIDIA A100-SXM4-40GB` is `a100sxm440gb`."""
    return re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub("", name.lower()))
