"""What one strategy and number of processes has saved, others continue: pairs of both, on tiny Llamas."""

import pytest
import torch

from tests.checkpoint.launching import start

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

ALL_PAIRS_OF = ("ddp:1", "fsdp2:2", "zero2:2", "zero3:2", "fsdp2:4")
RING = ("ddp:2", "zero1:2", "zero3:4", "hsdp:4", "zero2_offload:2", "ddp:4")
"""Each is continued by the next, the last by the first."""
PLACES = (*ALL_PAIRS_OF, *RING)
PAIRS = (
    *((source, target) for source in ALL_PAIRS_OF for target in ALL_PAIRS_OF),
    *zip(RING, (*RING[1:], RING[0]), strict=True),
)
WORLDS = (1, 2, 4)
VARIANTS = ("full", "lora")


def strategies_on(world):
    return [strategy for strategy, _, count in (place.partition(":") for place in PLACES) if int(count) == world]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def straight(folder):
    """Five steps in every place, a checkpoint after the third."""
    results = {}
    for world in WORLDS:
        specs = [
            {"name": (name := f"{strategy}:{world}-{variant}"), "strategy": strategy, "variant": variant}
            | {"folder": str(folder / name), "until": [3, 5], "save": [3]}
            for strategy in strategies_on(world)
            for variant in VARIANTS
        ]
        results |= start(folder, specs, world=world)
    return results


@pytest.fixture(scope="module")
def continued(folder, straight):
    """The last two steps again, in the place of each pair's target, from models whose trained weights are wrong."""
    results = {}
    for world in WORLDS:
        specs = [
            {"name": f"{source}-{variant}-to-{target}", "strategy": target.partition(":")[0], "variant": variant}
            | {"folder": str(folder / "empty"), "until": [5], "is_spoilt": True}
            | {"resume": str(folder / f"{source}-{variant}" / "step-000003")}
            for source, target in PAIRS
            for variant in VARIANTS
            if target.endswith(f":{world}")
        ]
        results |= start(folder, specs, world=world)
    return results


def test_every_place_is_source_and_target():
    assert len(PLACES) == 12
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(PLACES)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_training_resumed_under_another_world_size_has_the_same_losses_and_weights(
    folder, straight, continued, source, target, variant
):
    before, after = straight[f"{source}-{variant}"], continued[f"{source}-{variant}-to-{target}"]
    losses = [after["losses"][step] for step in ("3", "4")]
    assert losses == pytest.approx([before["losses"][step] for step in ("3", "4")], rel=1e-5)
    weights = [
        torch.load(folder / f"{name}.json.pt") for name in (f"{source}-{variant}", f"{source}-{variant}-to-{target}")
    ]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)
    if source == target:
        assert after["digest"] == before["digest"]
