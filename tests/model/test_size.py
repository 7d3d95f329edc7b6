import pytest
from torch import nn

from finetune.model.size import measure_model, optimizer_state_bytes, precision_warnings
from tests.refusals import pinned

BILLION = 10**9


@pytest.mark.parametrize(
    ("optimizer", "state_dtype", "weight_bytes", "expected"),
    [
        ("adamw", None, 4, 8),
        ("adamw", None, 2, 4),  # torch keeps moments in the weights' type
        ("adamw", "float32", 2, 8),
        ("adamw", "bfloat16", 4, 4),
        ("adamw", "int8", 4, 2 + 2 * 4 / 256),  # a scale for 256 values
        ("adamw_8bit", None, 4, 2 + 2 * 4 / 256),
        ("adamw_4bit", None, 4, 1 + 2 * 4 / 128),
        ("paged_adamw", None, 2, 8),
        ("sgd", None, 4, 4),
        ("adafactor", None, 4, 0),
    ],
)
def test_optimizer_state_takes_the_bytes_of_its_dtype(optimizer, state_dtype, weight_bytes, expected):
    found = optimizer_state_bytes(optimizer, state_dtype, num_trained=BILLION, trained_bytes=weight_bytes * BILLION)
    assert found == pytest.approx(expected * BILLION)


def test_the_largest_trained_parameter_is_measured():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    model[1].weight.requires_grad_(False)
    assert measure_model(model).largest_trained_bytes == 4 * 2 * 3


def test_partitioned_parameters_count_in_full():
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = model.weight.data.new_empty(0)
    model.weight.ds_shape = (2, 3)
    assert measure_model(model).num_parameters == 6
    assert measure_model(model).lines == ("trained: 6 of 6 parameters (100.00%)", "weights: 24 B in float32")


def test_trained_16_bit_weights_cause_a_warning():
    (warning,) = precision_warnings(dtype="bfloat16", is_lora=False)
    pinned(warning, "1/256", "`train.optimizer.stochastic_rounding: true`")
    assert precision_warnings(dtype="bfloat16", is_lora=False, uses_stochastic_rounding=True) == ()
    assert "moments" not in precision_warnings(dtype="float16", is_lora=False, state_dtype="float32")[0]
    assert precision_warnings(dtype="float32", is_lora=False) == ()
    assert precision_warnings(dtype="bfloat16", is_lora=True) == ()
    assert "(lm_head)" in precision_warnings(dtype="bfloat16", is_lora=True, modules_to_save=("lm_head",))[0]
