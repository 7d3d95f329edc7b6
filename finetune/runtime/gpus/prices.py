"""The table of prices: US dollars per GPU-hour, on demand and spot, by provider, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.gpus.specifications import require_gpu
from finetune.runtime.gpus.table import read_table

_OWN_TABLE = Path(__file__).with_name("prices.yaml")
_SOURCES = "sources"
_KEYS = ("on_demand", "spot", "source")


@dataclass(frozen=True)
class Price:
    """What one provider asks for a GPU-hour, in US dollars; None where it has no such offer."""

    provider: str
    on_demand: float | None
    spot: float | None
    source: str


def prices_of(kind: str, *, table: Path | None = None, gpu_table: Path | None = None) -> tuple[Price, ...]:
    """Return the prices of a kind of GPU, the lowest on demand first; those of the user's file replace the package's.

    Raises UserError for a file that cannot be read, or that names a kind that does not exist.
    """
    found = dict(_read(_OWN_TABLE, None))
    if table is not None:
        found |= _read(table, gpu_table)
    prices = found.get(kind, ())
    return tuple(sorted(prices, key=lambda price: (price.on_demand is None, price.on_demand or 0.0)))


def lowest(prices: tuple[Price, ...], offer: str) -> Price | None:
    """Return the price that is lowest `on_demand` or `spot`; None where nobody has such an offer."""
    offered = [price for price in prices if getattr(price, offer) is not None]
    return min(offered, key=lambda price: float(getattr(price, offer)), default=None)


@cache
def _read(path: Path, gpu_table: Path | None) -> Mapping[str, tuple[Price, ...]]:
    values = read_table(path)
    sources = values.pop(_SOURCES, {})
    return {
        require_gpu(kind, table=gpu_table, place=str(path)).name: _offers(kind, offers, sources, path)
        for kind, offers in values.items()
    }


def _offers(kind: str, offers: Any, sources: Any, path: Path) -> tuple[Price, ...]:
    if not isinstance(offers, dict) or not offers or not isinstance(sources, dict):
        raise UserError(
            f"{path}: `{kind}` must be a mapping of providers to prices, and `sources` one of names to text."
        )
    return tuple(_price(f"{kind}: {name}", str(name), offer, sources, path) for name, offer in offers.items())


def _price(place: str, provider: str, offer: Any, sources: Mapping[str, Any], path: Path) -> Price:
    if not isinstance(offer, dict) or not set(offer) <= set(_KEYS) or not {"on_demand", "spot"} & set(offer):
        raise UserError(f"{path}: {place}: write {{on_demand: USD, spot: USD, source: TEXT}}, at least one of the two.")
    numbers = [offer.get(name) for name in _KEYS[:2]]
    if any(each is not None and (isinstance(each, bool) or not isinstance(each, int | float)) for each in numbers):
        raise UserError(f"{path}: {place}: a price must be a number of US dollars per GPU-hour.")
    if any(each is not None and each <= 0 for each in numbers):
        raise UserError(f"{path}: {place}: a price must be above 0.")
    source = str(offer.get("source", path.name))
    on_demand, spot = (None if each is None else float(each) for each in numbers)
    return Price(provider, on_demand, spot, str(sources.get(source, source)))
