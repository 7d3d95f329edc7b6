"""GPU models and their prices: two editable tables, from the vendors' datasheets and the providers' price lists.

`gpu_specifications.yaml` has memory, peak FLOP/s by data type, and bandwidths; `gpu_prices.yaml` has US dollars per
GPU-hour, on demand and spot, by provider. A user's file of the same form adds entries.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.errors import UserError

_OWN_TABLE = Path(__file__).with_name("gpu_specifications.yaml")

_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct)\b")
_NUM_NAMES = 6


@dataclass(frozen=True)
class GpuModel:
    """A GPU model. Bandwidths are in bytes per second; link bandwidths are per direction.

    `flops` maps "fp8", "bf16", "fp16", "tf32" and "fp32" to the dense peak FLOP/s; data types that the device does not
    support are missing. `link` is the interconnect between the GPUs of a machine.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    pcie_bandwidth: float
    network_bandwidth: float  # per GPU, to other machines
    watts: float
    matmul_share: float  # the fraction of the peak that large matrix products reach
    names: tuple[str, ...]
    source: str
    attention_share: float  # the speed of attention, as a fraction of that of other matrix products

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s in this data type; that of fp32 if the device does not support it."""
        return self.flops.get(dtype, self.flops["fp32"])


def find_gpu(name: str, *, table: Path | None = None) -> GpuModel | None:
    """Return the GPU model for a name as used by torch, nvidia-smi or a user; None if it is not in the table.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("a100-40gb").name, find_gpu("RTX 4090 Laptop GPU")
    ('H100-80GB', 'A100-40GB', None)
    """
    normalized = _normalized(name)
    for gpu in gpu_models(table):
        if normalized in {_normalized(alias) for alias in (gpu.name, *gpu.names)}:
            return gpu
    return None


def require_gpu(name: str, *, table: Path | None = None, location: str = "--gpus") -> GpuModel:
    """Return the GPU model of this name, which is written at `location`; raises UserError with the nearest names."""
    gpu = find_gpu(name, table=table)
    if gpu is not None:
        return gpu
    raise UserError(
        f"{location}: there is no GPU `{name}` in the table. Nearest: {', '.join(nearest_names(name, table=table))}. "
        "Describe a missing GPU in your own file: --gpu-table FILE."
    )


def nearest_names(name: str, *, table: Path | None = None) -> list[str]:
    """Return the most similar names of the table, best match first; all names if none is similar."""
    by_name = {_normalized(alias): gpu.name for gpu in gpu_models(table) for alias in (gpu.name, *gpu.names)}
    close = get_close_matches(_normalized(name), list(by_name), n=_NUM_NAMES, cutoff=0.5)
    return list(dict.fromkeys(by_name[match] for match in close)) or [gpu.name for gpu in gpu_models(table)]


def gpu_models(table: Path | None = None) -> Sequence[GpuModel]:
    """Return all GPU models: first from the user's file, then the package's. Raises UserError for invalid files."""
    return (*(_read(table) if table is not None else ()), *_read(_OWN_TABLE))


ATTENTION_SHARE = 0.9
"""The `attention_share` of an entry that has none: fitted to published runs on A100 (docs/how-to/planning.md)."""

MEMORY_SHARE = 0.8
"""Share of the memory's bandwidth that element-wise kernels reach."""

_OPTIONAL = "attention_share"

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


@cache
def _read(path: Path) -> tuple[GpuModel, ...]:
    gpus = []
    for name, values in read_yaml_table(path).items():
        if not isinstance(values, dict) or sorted({*values} - {_OPTIONAL}) != sorted(_KEYS):
            raise UserError(f"{path}: the entry `{name}` must have exactly the keys {', '.join(_KEYS)}.")
        try:
            gpu = GpuModel(
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
                names=tuple(str(alias) for alias in values["names"]),
                source=str(values["source"]),
                attention_share=float(values.get(_OPTIONAL, ATTENTION_SHARE)),
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path}: the entry `{name}` has a value of the wrong type ({error}). `tflops` needs at least fp32."
            ) from None
        gpus.append(gpu)
    return tuple(gpus)


def _normalized(name: str) -> str:
    """Return the name without vendor, case and punctuation: `NVIDIA A100-SXM4-40GB` is `a100sxm440gb`."""
    return re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub("", name.lower()))


def read_yaml_table(path: Path) -> dict[str, Any]:
    """Return the entries of the file by name; raises UserError if it cannot be read or is not a mapping."""
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: this table cannot be read: {first}.") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: a table must be a mapping of names to entries.")
    return {str(name): entry for name, entry in values.items()}


_PRICES = Path(__file__).with_name("gpu_prices.yaml")
_SOURCES = "sources"
_PRICE_KEYS = ("on_demand", "spot", "source")


@dataclass(frozen=True)
class Price:
    """A provider's price of a GPU-hour in US dollars; None if it does not offer it."""

    provider: str
    on_demand: float | None
    spot: float | None
    source: str


def prices_of(gpu: str, *, table: Path | None = None, gpu_table: Path | None = None) -> tuple[Price, ...]:
    """Return the prices of a GPU model, lowest on-demand price first; the user's file replaces the package's prices.

    Raises UserError for a file that cannot be read, or that names an unknown GPU.
    """
    by_gpu = dict(_read_prices(_PRICES, None))
    if table is not None:
        by_gpu |= _read_prices(table, gpu_table)
    prices = by_gpu.get(gpu, ())
    return tuple(sorted(prices, key=lambda price: (price.on_demand is None, price.on_demand or 0.0)))


def lowest(prices: tuple[Price, ...], offer: str) -> Price | None:
    """Return the lowest price for `on_demand` or `spot`; None if there is no such offer."""
    offered = [price for price in prices if getattr(price, offer) is not None]
    return min(offered, key=lambda price: float(getattr(price, offer)), default=None)


@cache
def _read_prices(path: Path, gpu_table: Path | None) -> Mapping[str, tuple[Price, ...]]:
    values = read_yaml_table(path)
    sources = values.pop(_SOURCES, {})
    prices: dict[str, tuple[Price, ...]] = {}
    for gpu, offers in values.items():
        name = require_gpu(gpu, table=gpu_table, location=str(path)).name
        if not isinstance(offers, dict) or not offers or not isinstance(sources, dict):
            raise UserError(
                f"{path}: `{gpu}` must be a mapping of providers to prices, and `sources` a mapping of names to text."
            )
        prices[name] = ()
        for provider, offer in offers.items():
            entry = f"{path}: {gpu}: {provider}"
            is_offer = isinstance(offer, dict) and set(offer) <= set(_PRICE_KEYS)
            if not is_offer or not {"on_demand", "spot"} & set(offer):
                raise UserError(f"{entry}: write {{on_demand: USD, spot: USD, source: TEXT}}, at least one price.")
            numbers = [offer.get(key) for key in _PRICE_KEYS[:2]]
            if any(usd is not None and (isinstance(usd, bool) or not isinstance(usd, int | float)) for usd in numbers):
                raise UserError(f"{entry}: a price must be a number of US dollars per GPU-hour.")
            if any(usd is not None and usd <= 0 for usd in numbers):
                raise UserError(f"{entry}: a price must be above 0.")
            on_demand, spot = (None if usd is None else float(usd) for usd in numbers)
            source = str(offer.get("source", path.name))
            prices[name] += (Price(str(provider), on_demand, spot, str(sources.get(source, source))),)
    return prices
