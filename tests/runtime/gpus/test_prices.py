"""Every entry of the price table is for an existing GPU model and names its source."""

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.runtime.gpus.prices import lowest, prices_of
from finetune.runtime.gpus.specifications import gpu_models


def test_prices_are_of_kinds_that_exist_and_name_their_source():
    found = {kind.name: prices_of(kind.name) for kind in gpu_models()}
    priced = [price for prices in found.values() for price in prices]
    assert len(priced) >= 40
    for price in priced:
        assert " " in price.source and "202" in price.source, price
        assert price.spot is None or price.on_demand is None or price.spot < price.on_demand
        assert all(0.1 < usd < 20 for usd in (price.on_demand, price.spot) if usd is not None)
    assert {"T4", "A10G", "L4", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200", "MI300X"} <= {
        name for name, prices in found.items() if prices
    }


def test_the_lowest_price_on_demand_comes_first():
    prices = prices_of("H100-80GB")
    asked = [price.on_demand for price in prices if price.on_demand is not None]
    assert asked == sorted(asked) and len(asked) >= 4
    assert lowest(prices, "on_demand") == prices[0]
    spot = lowest(prices, "spot")
    assert spot is not None and spot.spot == 2.25
    assert lowest((), "spot") is None


def test_a_price_file_replaces_the_gpu_types_it_names(tmp_path: Path):
    table = tmp_path / "mine.yaml"
    table.write_text("H100: {our cluster: {on_demand: 1.5}}\n")
    (price,) = prices_of("H100-80GB", table=table)
    assert (price.provider, price.on_demand, price.spot, price.source) == ("our cluster", 1.5, None, "mine.yaml")
    assert prices_of("T4", table=table) == prices_of("T4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100: {us: {price: 1}}", "H100: us: write {on_demand: USD"),
        ("H100: {us: {on_demand: '1'}}", "must be a number"),
        ("H100: {us: {spot: -1}}", "must be above 0"),
        ("H100: 3", "mapping of providers"),
        ("H101: {us: {spot: 1}}", "there is no GPU `H101` in the table. Nearest: H100"),
    ],
)
def test_a_damaged_file_is_reported_by_one_message_with_its_path(tmp_path: Path, text: str, message: str):
    table = tmp_path / "mine.yaml"
    table.write_text(text)
    with pytest.raises(UserError, match=message):
        prices_of("H100-80GB", table=table)
