"""What one strategy has saved, itself and every other one continue: tiny Llamas on two processes without a GPU."""

import pytest
import torch

from tests.checkpoint.launching import start

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload")
ENGINES = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"}
SAVED = [
    *((strategy, "full") for strategy in STRATEGIES),
    *((strategy, "lora") for strategy in ("ddp", "fsdp2", "zero2", "zero3")),
    *((strategy, "frozen") for strategy in ("fsdp2", "zero3")),
    ("zero2", "bf16"),  # the weights that train are copies of fp32 masters elsewhere
    ("ddp", "adafactor"),
    ("zero2", "groups"),  # rates of their own, a later beginning, an average
    ("fsdp2", "int8"),  # moments in few bits, with scales of blocks
    ("fsdp2", "chance"),
]
FROM_START = ("fsdp2", "zero2", "zero3")
CROSSED = [
    ("ddp", "zero3", "full"),
    ("zero3", "fsdp2", "full"),
    ("fsdp2", "zero2_offload", "full"),
    ("zero2_offload", "ddp", "full"),
    ("zero1", "fsdp2", "full"),
    ("zero2", "ddp", "lora"),
    ("fsdp2", "zero3", "lora"),
    ("zero3", "fsdp2", "frozen"),
    ("zero2", "ddp", "groups"),
    ("fsdp2", "ddp", "int8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(folder):
    """Five steps without a stop, a checkpoint after the third."""
    specs = [
        {
            "name": f"{strategy}-{variant}",
            "strategy": strategy,
            "variant": variant,
            "folder": str(folder / f"{strategy}-{variant}"),
            "until": [0, 3, 5],
            "save": [0, 3] if strategy in FROM_START and variant == "full" else [3],
            "evaluate": variant == "frozen",  # leaves FSDP's outermost module gathered when it is saved
        }
        for strategy, variant in SAVED
    ]
    specs.append({**specs[2], "name": "refused", "variant": "adafactor", "folder": str(folder / "refused")})
    return start(folder, specs)


@pytest.fixture(scope="module")
def continued(folder, straight):
    """The last two steps again, in new processes, from models whose trained weights are wrong."""
    base = {"is_spoilt": True, "until": [5]}
    same = [
        {**base, "name": f"{strategy}-{variant}-again", "strategy": strategy, "variant": variant}
        | {"folder": str(folder / f"{strategy}-{variant}")}
        for strategy, variant in SAVED
    ]
    crossed = [
        {**base, "name": f"{source}-{target}-{variant}", "strategy": target, "variant": variant}
        | {"folder": str(folder / "empty"), "resume": str(folder / f"{source}-{variant}" / "step-000003")}
        for source, target, variant in CROSSED
    ]
    from_start = [
        {**base, "name": f"{strategy}-start", "strategy": strategy, "variant": "full", "folder": str(folder / "empty")}
        | {"resume": str(folder / f"{strategy}-full" / "step-000000")}
        for strategy in FROM_START
    ]
    return start(folder, [*same, *crossed, *from_start])


@pytest.mark.parametrize(("strategy", "variant"), SAVED)
def test_resuming_under_the_same_strategy_is_bitwise_identical(straight, continued, strategy, variant):
    before, after = straight[f"{strategy}-{variant}"], continued[f"{strategy}-{variant}-again"]
    assert ENGINES.get(strategy, "DeepSpeedEngine") in after["engine"]
    assert list(after["losses"]) == ["3", "4"]
    assert after["losses"] == {step: before["losses"][step] for step in ("3", "4")}
    assert after["digest"] == before["digest"]


def test_stochastically_rounded_weights_stay_in_16_bits(straight, continued):
    runs = (straight["fsdp2-chance"], continued["fsdp2-chance-again"])
    assert [run["dtypes"] for run in runs] == [["torch.bfloat16", "torch.float32"]] * 2  # the buffer is float32


@pytest.mark.parametrize(("source", "target", "variant"), CROSSED)
def test_another_strategy_continues_with_the_same_losses_and_weights(
    folder, straight, continued, source, target, variant
):
    before, after = straight[f"{source}-{variant}"], continued[f"{source}-{target}-{variant}"]
    assert list(after["losses"]) == ["3", "4"]
    assert [after["losses"][step] for step in ("3", "4")] == pytest.approx(
        [before["losses"][step] for step in ("3", "4")], rel=1e-5
    )
    weights = [
        torch.load(folder / f"{name}.json.pt") for name in (f"{source}-{variant}", f"{source}-{target}-{variant}")
    ]
    assert set(weights[0]) == set(weights[1])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", FROM_START)
def test_a_checkpoint_from_before_the_first_step_brings_no_optimizer_state(straight, continued, strategy):
    before, after = straight[f"{strategy}-full"], continued[f"{strategy}-start"]
    assert len(after["losses"]) == 5
    assert (after["losses"], after["digest"]) == (before["losses"], before["digest"])


def test_all_strategies_learn_the_same_under_the_same_names(straight):
    losses = [straight[f"{strategy}-full"]["losses"]["4"] for strategy in STRATEGIES]
    assert losses == pytest.approx([losses[0]] * len(STRATEGIES), rel=1e-5)
    names = [straight[f"{strategy}-lora"]["trained"] for strategy in ("ddp", "fsdp2", "zero2", "zero3")]
    assert len(names[0]) == 28 and all("lora_" in name for name in names[0])
    assert all(each == names[0] for each in names)


def test_an_optimizer_that_cannot_be_cut_is_refused_before_the_first_step(folder, straight):
    assert "the state of Adafactor cannot be saved while parameters are sharded" in straight["refused"]["error"]
    assert not (folder / "refused").exists()
