"""ZeRO's buckets follow the model's size, and what was written stays."""

from types import SimpleNamespace

from torch import nn

from finetune.strategy.buckets import SMALLEST, bucket_sizes, fill_buckets


def accelerator_of(zero: dict | None) -> SimpleNamespace:
    plugin = None if zero is None else SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def model_of(width: int) -> nn.Module:
    model = nn.Linear(width, width)
    model.config = SimpleNamespace(hidden_size=width)
    return model


def test_a_large_model_reduces_a_matrix_at_a_time_and_a_small_one_everything_at_once():
    assert bucket_sizes(num_trained=10**10, width=4096, stage=2) == {"reduce_bucket_size": 4096 * 4096}
    assert bucket_sizes(num_trained=10**8, width=512, stage=2) == {"reduce_bucket_size": SMALLEST}
    assert bucket_sizes(num_trained=1000, width=32, stage=1) == {"reduce_bucket_size": 1000}


def test_stage_3_gathers_ahead_nearly_a_bucket_and_keeps_vectors_whole():
    assert bucket_sizes(num_trained=10**10, width=4096, stage=3) == {
        "reduce_bucket_size": 16_777_216,
        "stage3_prefetch_bucket_size": 15_099_494,
        "stage3_param_persistence_threshold": 40_960,
    }


def test_what_is_left_out_or_auto_is_filled_in_and_what_is_written_stays():
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    fill_buckets(accelerator_of(zero), model_of(4))
    assert zero == {
        "stage": 3,
        "reduce_bucket_size": 20,
        "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 40,
    }


def test_without_deepspeed_nothing_is_filled_in():
    fill_buckets(accelerator_of(None), model_of(4))
