from torch import nn

from finetune.model.memory import estimate
from finetune.model.precision import precision_warnings
from finetune.model.size import describe

BILLION = 10**9


def adamw(shards: int, **sharded: bool):
    return estimate(
        weights_bytes=4 * BILLION,
        trained_bytes=4 * BILLION,
        num_trained=BILLION,
        optimizer_bytes_per_parameter=8,
        shards=shards,
        shards_weights=sharded.get("weights", False),
        shards_gradients=sharded.get("gradients", False),
        shards_optimizer=sharded.get("optimizer", False),
    )


def test_a_billion_float32_weights_with_adamw_take_16_gb():
    assert adamw(1).total_bytes == 16 * BILLION


def test_each_part_is_divided_only_where_it_is_sharded():
    assert adamw(4).total_bytes == 16 * BILLION
    assert adamw(4, optimizer=True).total_bytes == (4 + 4 + 2) * BILLION
    assert adamw(4, optimizer=True, gradients=True, weights=True).total_bytes == 4 * BILLION


def test_the_arithmetic_is_printed():
    assert adamw(4, optimizer=True).lines == (
        "weights: 4.0 GB on every rank",
        "gradients: 4.0 GB on every rank",
        "optimizer state: 2.0 GB per rank = 8.0 GB / 4 ranks",
        "memory: 10.0 GB per rank = weights 4.0 GB + gradients 4.0 GB + optimizer state 2.0 GB, before activations",
    )


def test_partitioned_parameters_count_in_full():
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = model.weight.data.new_empty(0)
    model.weight.ds_shape = (2, 3)
    assert describe(model).num_parameters == 6
    assert describe(model).lines == ("trained: 6 of 6 parameters (100.00%)", "weights: 24 B in float32")


def test_sixteen_bit_weights_that_learn_are_warned_about():
    (warning,) = precision_warnings(dtype="bfloat16", is_lora=False)
    assert "2^-8 (1/256) of a weight is rounded away" in warning
    assert precision_warnings(dtype="float32", is_lora=False) == ()
    assert precision_warnings(dtype="bfloat16", is_lora=True) == ()
    assert "(lm_head)" in precision_warnings(dtype="bfloat16", is_lora=True, modules_to_save=("lm_head",))[0]
