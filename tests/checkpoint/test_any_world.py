"""What any number of processes has saved, under any strategy, every other number continues: all pairs."""

import pytest
import torch
from launching import start

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

WORLDS = {1: ("ddp", "fsdp2", "zero3"), 2: ("fsdp2", "zero2", "zero3"), 4: ("ddp", "fsdp1", "fsdp2", "hsdp", "zero3")}
PLACES = [(strategy, world) for world, strategies in WORLDS.items() for strategy in strategies]
VARIANTS = ("full", "lora")


def title(place, variant):
    return f"{place[0]}:{place[1]}-{variant}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def straight(folder):
    results = {}
    for world, strategies in WORLDS.items():
        specs = [
            {"name": title((strategy, world), variant), "strategy": strategy, "variant": variant, "until": [3, 5]}
            | {"folder": str(folder / title((strategy, world), variant)), "save": [3]}
            for strategy in strategies
            for variant in VARIANTS
        ]
        results |= start(folder, specs, world=world)
    return results


@pytest.fixture(scope="module")
def continued(folder, straight):
    results = {}
    for world, strategies in WORLDS.items():
        specs = [
            {"name": f"{title(source, variant)}-to-{strategy}:{world}", "strategy": strategy, "variant": variant}
            | {"folder": str(folder / "empty"), "until": [5], "is_spoilt": True}
            | {"resume": str(folder / title(source, variant) / "step-000003")}
            for strategy in strategies
            for source in PLACES
            for variant in VARIANTS
        ]
        results |= start(folder, specs, world=world)
    return results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", PLACES, ids=lambda place: f"{place[0]}:{place[1]}")
@pytest.mark.parametrize("target", PLACES, ids=lambda place: f"{place[0]}:{place[1]}")
def test_training_goes_on_as_if_nothing_had_changed(folder, straight, continued, source, target, variant):
    before = straight[title(source, variant)]
    name = f"{title(source, variant)}-to-{target[0]}:{target[1]}"
    losses = [continued[name]["losses"][step] for step in ("3", "4")]
    assert losses == pytest.approx([before["losses"][step] for step in ("3", "4")], rel=1e-5)
    weights = [torch.load(folder / f"{each}.json.pt") for each in (title(source, variant), name)]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)
    if source == target:
        assert continued[name]["digest"] == before["digest"]
