"""GPU models are found by the names of torch, nvidia-smi and clouds; prices are of existing models, with a source."""

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.runtime.gpus import ATTENTION_SHARE, find_gpu, gpu_models, lowest, nearest_names, prices_of, require_gpu


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),  # torch.cuda.get_device_name
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100", "H100-80GB"),
        ("A100-80gb", "A100-80GB"),
        ("l40s", "L40S"),
    ],
)
def test_a_gpu_is_found_by_the_names_that_it_goes_by(written: str, name: str):
    kind = find_gpu(written)
    assert kind is not None and kind.name == name


@pytest.mark.parametrize(
    "other", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", ""]
)
def test_a_gpu_variant_with_other_specifications_is_not_mistaken_for_its_namesake(other: str):
    assert find_gpu(other) is None


def test_specifications_equal_the_datasheets():
    """H100 SXM (2023): 1,979 TFLOP/s of bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s in both directions together."""
    h100 = find_gpu("H100")
    assert h100 is not None
    assert h100.flops["bf16"] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert h100.memory_bandwidth == 3.35e12
    assert h100.link_bandwidth == 900e9 / 2
    assert 79 * 2**30 < h100.memory_bytes < 80 * 2**30
    t4 = find_gpu("T4")
    assert t4 is not None and "bf16" not in t4.flops
    assert t4.peak_flops("bf16") == t4.flops["fp32"] == 8.1e12


def test_attention_is_as_fast_as_on_an_a100_unless_the_entry_has_another_share():
    shares = {name: require_gpu(name).attention_share for name in ("A100-80GB", "L40S", "H100", "B200")}
    assert shares == {"A100-80GB": ATTENTION_SHARE, "L40S": ATTENTION_SHARE, "H100": 0.53, "B200": 0.53}


def test_every_entry_is_plausible_and_every_name_is_of_one_kind():
    names: dict[str, str] = {}
    assert len(gpu_models()) >= 35
    for kind in gpu_models():
        assert 8 < kind.memory_bytes / 2**30 < 300, kind.name
        assert kind.flops["fp32"] <= kind.peak_flops("tf32") <= kind.peak_flops("fp16") < 3e15, kind.name
        assert 2e11 < kind.memory_bandwidth < 1e13, kind.name
        assert kind.pcie_bandwidth <= kind.link_bandwidth or kind.link == "network", kind.name
        assert 0.4 < kind.matmul_share < 1, kind.name
        assert kind.network_bandwidth <= kind.link_bandwidth, kind.name
        assert kind.source and "20" in kind.source, kind.name
        for name in (kind.name, *kind.names):
            assert find_gpu(name) is kind, f"{name} is a name of {names.get(name)} and of {kind.name}"
            names[name] = kind.name


def test_an_unknown_gpu_is_answered_with_the_nearest_names():
    assert nearest_names("H100-81GB")[0] == "H100-80GB"
    with pytest.raises(UserError, match=r"no GPU `A100-45GB` in the table. Nearest: A100-[48]0GB, .*--gpu-table FILE"):
        require_gpu("A100-45GB")


def test_entries_of_a_users_file_come_first(tmp_path: Path):
    table = tmp_path / "mine.yaml"
    entry = (
        "{memory_gib: 15, tflops: {bf16: 100, fp32: 50}, memory_gbps: 576, link: PCIe, link_gbps: 31.5, "
        "pcie_gbps: 31.5, network_gbps: 0.1, watts: 175, matmul_share: 0.9, "
        "names: [RTX 4090 Laptop GPU], source: measured here 2026}"
    )
    table.write_text(f"RTX4090-Laptop: {entry}\nH100-80GB: {entry}\n")
    laptop = find_gpu("NVIDIA GeForce RTX 4090 Laptop GPU", table=table)
    assert laptop is not None and laptop.flops["bf16"] == 100e12
    h100 = find_gpu("H100-80GB", table=table)
    assert h100 is not None and h100.flops["bf16"] == 100e12
    assert find_gpu("T4", table=table) is find_gpu("T4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- A", "must be a mapping"),
        ("A: {memory_gib: 1}", "the entry `A` must have exactly the keys memory_gib"),
        ("A: [", "cannot be read"),
    ],
)
def test_a_broken_table_is_an_error_that_names_the_entry(tmp_path: Path, text: str, message: str):
    table = tmp_path / "mine.yaml"
    table.write_text(text)
    with pytest.raises(UserError, match=message):
        find_gpu("A", table=table)


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
