import pytest
from torch import nn

from finetune.model.size import estimate_memory, measure_model, optimizer_state_bytes, precision_warnings

BILLION = 10**9


def adamw(shards: int, **sharded: bool):
    return estimate_memory(
        weights_bytes=4 * BILLION,
        gradients_bytes=4 * BILLION,
        optimizer_bytes=optimizer_state_bytes("adamw", None, num_trained=BILLION, trained_bytes=4 * BILLION),
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


@pytest.mark.parametrize(
    ("optimizer", "state_dtype", "weight_bytes", "expected"),
    [
        ("adamw", None, 4, 8),
        ("adamw", None, 2, 4),  # torch keeps moments in the weights' type
        ("adamw", "float32", 2, 8),
        ("adamw", "bfloat16", 4, 4),
        ("adamw", "int8", 4, 2 + 2 * 4 / 256),  # a scale for 256 values
        ("adamw_8bit", None, 4, 2 + 2 * 4 / 256),
        ("sgd", None, 4, 4),
        ("adafactor", None, 4, 0),
    ],
)
def test_state_takes_what_its_type_does(optimizer, state_dtype, weight_bytes, expected):
    found = optimizer_state_bytes(optimizer, state_dtype, num_trained=BILLION, trained_bytes=weight_bytes * BILLION)
    assert found == pytest.approx(expected * BILLION)


def test_a_live_teacher_is_named_where_it_is_not_counted():
    shards = {"shards": 1, "shards_weights": False, "shards_gradients": False, "shards_optimizer": False}
    estimate = estimate_memory(weights_bytes=4, gradients_bytes=4, optimizer_bytes=8, has_teacher=True, **shards)
    assert estimate.lines[-1].endswith("without the teacher and activations")


def test_the_largest_parameter_that_learns_is_known():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    model[1].weight.requires_grad_(False)
    assert measure_model(model).largest_trained_bytes == 4 * 2 * 3


def test_the_arithmetic_is_printed():
    assert adamw(4, optimizer=True).lines == (
        "weights: 4.0 GB on every rank",
        "gradients: 4.0 GB on every rank",
        "optimizer state: 2.0 GB per rank = 8.0 GB / 4 ranks",
        "memory: 10.0 GB per rank = weights 4.0 GB + gradients 4.0 GB + optimizer state 2.0 GB, without activations",
    )


def test_on_a_cpu_the_process_counts_as_it_does_in_the_measured_peak():
    shards = {"shards": 1, "shards_weights": False, "shards_gradients": False, "shards_optimizer": False}
    parts = {"weights_bytes": 1_000_000, "gradients_bytes": 1_000_000, "optimizer_bytes": 2_000_000}
    estimate = estimate_memory(**parts, **shards, process_bytes=400_000_000)
    assert estimate.lines[-1].startswith("memory: 404.0 MB per rank = weights 1.0 MB + ")
    assert estimate.lines[-1].endswith(" + process 400.0 MB, without activations")
    assert estimate.total_bytes == 4_000_000


def test_a_whole_gradient_between_microbatches_counts_on_every_rank():
    shards = {"shards": 8, "shards_weights": True, "shards_gradients": True, "shards_optimizer": True}
    parts = {"weights_bytes": 32 * BILLION, "gradients_bytes": 32 * BILLION, "optimizer_bytes": 64 * BILLION}
    estimate = estimate_memory(**parts, **shards, unsharded_gradient_bytes=32 * BILLION)
    assert estimate.total_bytes == (4 + 4 + 8 + 32) * BILLION
    assert estimate.lines[-1].startswith("memory: 48.0 GB per rank = ")
    assert " + unsharded gradient 32.0 GB, without activations" in estimate.lines[-1]


def test_partitioned_parameters_count_in_full():
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = model.weight.data.new_empty(0)
    model.weight.ds_shape = (2, 3)
    assert measure_model(model).num_parameters == 6
    assert measure_model(model).lines == ("trained: 6 of 6 parameters (100.00%)", "weights: 24 B in float32")


def test_sixteen_bit_weights_that_learn_are_warned_about():
    (warning,) = precision_warnings(dtype="bfloat16", is_lora=False)
    assert "2^-8 (1/256) of a weight is rounded away" in warning
    assert "or `train.optimizer.stochastic_rounding: true`" in warning
    assert precision_warnings(dtype="bfloat16", is_lora=False, uses_stochastic_rounding=True) == ()
    assert "moments" not in precision_warnings(dtype="float16", is_lora=False, state_dtype="float32")[0]
    assert precision_warnings(dtype="float32", is_lora=False) == ()
    assert precision_warnings(dtype="bfloat16", is_lora=True) == ()
    assert "(lm_head)" in precision_warnings(dtype="bfloat16", is_lora=True, modules_to_save=("lm_head",))[0]
