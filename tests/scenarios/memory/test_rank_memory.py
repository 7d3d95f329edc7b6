"""What each rank of a run keeps in memory and sends, measured from within."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.devices import EVERY_DEVICE
from tests.scenarios.conftest import Ended
from tests.scenarios.memory.measured_program import ONLY_PREPARES

MODEL = {
    "cpu": "hidden_size: 128, intermediate_size: 512, num_hidden_layers: 4",  # a gradient of 4 MB
    "cuda": "hidden_size: 1536, intermediate_size: 6144, num_hidden_layers: 12",  # a gradient of 1.7 GB
    "large": "hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 8",  # 280 MB in float32
}
HEADS = {
    **dict.fromkeys(("cpu", "large"), "num_attention_heads: 4, num_key_value_heads: 2"),
    "cuda": "num_attention_heads: 12, num_key_value_heads: 6",
}
PROGRAM = ("-m", "tests.scenarios.memory.measured_program")
LARGE_PARAMETERS = 8 * (768 * 768 * 3 + 3 * 768 * 3072)
NUM_PROCESSES = {"cpu": 2, "cuda": 1}
WITHOUT_EVALUATION = ("evaluate=null", "data.validation=null")


@pytest.fixture(scope="module")
def measured(launch, tmp_path_factory) -> Callable[..., tuple[Ended, list[dict[str, Any]]]]:
    """Return a function that runs the job with a model of that size: the run, and what each rank has measured."""

    def start(strategy: str, size: str, *overrides: str, processes: int = 2, only_prepares: bool = False):
        folder = tmp_path_factory.mktemp("measured")
        values = f"{MODEL[size]}, {HEADS[size]}, tie_word_embeddings: true"
        settings = [
            f"model.from_config={{model_type: llama, values: {{{values}}}}}",
            *("train.precision=bf16", "train.steps=3", "checkpoint.every_steps=null", *WITHOUT_EVALUATION, *overrides),
        ]
        keys = {"environment": {ONLY_PREPARES: "1"} if only_prepares else {}, "program": (*PROGRAM, str(folder))}
        run = launch(strategy, name=folder.name, processes=processes, overrides=settings, **keys)
        assert run.code == 0, run.output
        return run, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]

    return start


@pytest.mark.full
@EVERY_DEVICE
def test_accumulation_under_fsdp2_takes_no_more_than_a_shard(device, measured, figure):
    num = NUM_PROCESSES[device]
    sizes = (f"train.global_batch_size={4 * num}", "run.deterministic=true", "model.gradient_checkpointing=true")
    alone, alone_ranks = measured("fsdp2", device, *sizes, "train.microbatch_size=4", processes=num)
    accumulated, ranks = measured("fsdp2", device, *sizes, "train.microbatch_size=1", processes=num)
    assert "gradients are reduced after each of the 4 microbatches" in accumulated.output
    assert accumulated.losses() == pytest.approx(alone.losses(), rel=2e-2)
    more = ranks[0]["step_bytes"][-1] - alone_ranks[0]["step_bytes"][-1]
    limit = {"cpu": 1e6, "cuda": 1e9}[device]  # on a CPU 0.16 MB alone, once 0.64 beside other tests: not known why
    figure("fsdp2: memory that accumulation 4 takes more than accumulation 1, bytes", more, at_most=limit)


@pytest.mark.distributed
def test_a_rank_that_is_sent_bf16_weights_takes_no_memory_for_them(measured, figure):
    _, ranks = measured("fsdp2", "large", "model.dtype=bfloat16", only_prepares=True)
    taken = ranks[1]["bytes_without_values"] / (4 * LARGE_PARAMETERS)
    figure("fsdp2, bf16 weights: memory of rank 1 before it has values, share of the float32 model", taken, at_most=0.2)


@pytest.mark.distributed
def test_ddp_sends_no_buffers_in_forward_passes(measured, figure):
    run, ranks = measured("ddp", "cpu")
    assert ranks[1]["buffers"] > 0  # `inv_freq` is one
    assert len(run.losses()) == 3
    figure("ddp: times that buffers are sent in three steps", ranks[1]["buffers_sent"], at_most=0)


@pytest.mark.full
@pytest.mark.distributed
def test_a_sum_of_shards_trains_as_a_sum_of_whole_gradients(launch):
    overrides = ["train.microbatch_size=1", *WITHOUT_EVALUATION]
    whole = launch("fsdp2", name="whole", overrides=overrides)
    shards = launch("fsdp2", name="shards", overrides=[*overrides, "run.deterministic=true"])
    assert (whole.code, shards.code) == (0, 0), whole.output + shards.output
    assert "gradients are reduced once a step; until then each rank keeps the whole gradient" in whole.output
    assert "gradients are reduced after each of the" in shards.output
    assert shards.losses() == pytest.approx(whole.losses(), rel=1e-6)
    assert shards.norms() == pytest.approx(whole.norms(), rel=1e-5)
