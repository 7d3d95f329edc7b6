"""The table of prices: US dollars per GPU-hour, on demand and spot, by provider, with sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.gpus.specifications import read_table, require_gpu

_OWN_TABLE = Path(__file__).with_name("prices.yaml")
_SOURCES = "sources"
_KEYS = ("on_demand", "spot", "source")


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
    by_gpu = dict(_read(_OWN_TABLE, None))
    if table is not None:
        by_gpu |= _read(table, gpu_table)
    prices = by_gpu.get(gpu, ())
    return tuple(sorted(prices, key=lambda price: (price.on_demand is None, price.on_demand or 0.0)))


def lowest(prices: tuple[Price, ...], offer: str) -> Price | None:
    """Return the lowest price for `on_demand` or `spot`; None if there is no such offer."""
    offered = [price for price in prices if getattr(price, offer) is not None]
    return min(offered, key=lambda price: float(getattr(price, offer)), default=None)


@cache
def _read(path: Path, gpu_table: Path | None) -> Mapping[str, tuple[Price, ...]]:
    values = read_table(path)
    sources = values.pop(_SOURCES, {})
    prices = {}
    for gpu, offers in values.items():
        name = require_gpu(gpu, table=gpu_table, location=str(path)).name
        if not isinstance(offers, dict) or not offers or not isinstance(sources, dict):
            raise UserError(
                f"{path}: `{gpu}` must be a mapping of providers to prices, and `sources` a mapping of names to text."
            )
        prices[name] = tuple(
            _price(f"{gpu}: {provider}", str(provider), offer, sources, path) for provider, offer in offers.items()
        )
    return prices


def _price(entry: str, provider: str, offer: Any, sources: Mapping[str, Any], path: Path) -> Price:
    if not isinstance(offer, dict) or not set(offer) <= set(_KEYS) or not {"on_demand", "spot"} & set(offer):
        raise UserError(f"{path}: {entry}: write {{on_demand: USD, spot: USD, source: TEXT}}, at least one price.")
    numbers = [offer.get(name) for name in _KEYS[:2]]
    if any(price is not None and (isinstance(price, bool) or not isinstance(price, int | float)) for price in numbers):
        raise UserError(f"{path}: {entry}: a price must be a number of US dollars per GPU-hour.")
    if any(price is not None and price <= 0 for price in numbers):
        raise UserError(f"{path}: {entry}: a price must be above 0.")
    source = str(offer.get("source", path.name))
    on_demand, spot = (None if price is None else float(price) for price in numbers)
    return Price(provider, on_demand, spot, str(sources.get(source, source)))
