"""Hybrid, sink and latent attention decoders: padding-free batches have the losses of padded ones everywhere.

The jobs of one strategy share a launch.
"""

import json

import pytest

from tests.model.attention.small_models import small_values
from tests.task_cases.case import LORA, Case
from tests.task_cases.language import SFT, conversations, loss_of_answers
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(1800)]

LEFT_OUT = {
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings"),
    *("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"),
}
"""What the tokenizer sets, and what a config does not declare."""

PADDED = ("data.batching.padding_free=false",)
PACKS = ("data.batching={by: packs, tokens: 160}", "train.global_batch_size=4", "train.microbatch_size=1")
RECOMPUTED = ("model.gradient_checkpointing=true",)

OF_SINGLE = {
    "deepseek_v3": {"padded": PADDED, "free": ()},
    "falcon_h1": {"padded": PADDED, "free": RECOMPUTED},
    "gpt_oss": {"padded": PADDED, "free": ()},
    "lfm2_moe": {"padded": PADDED, "free": (), "packs": PACKS},
    "mamba2": {"padded": PADDED, "free": RECOMPUTED},
    "qwen3_5_text": {"padded": (*LORA, *PADDED), "free": LORA},
    "qwen3_next": {"padded": PADDED, "free": ()},
}
"""Variants of each architecture on one process."""

SPREAD = {
    "ddp": {"qwen3_5_text": "free", "gpt_oss": "free"},
    "fsdp2": {"falcon_h1": "free", "mamba2": "free", "qwen3_5_text": "free"},
    "zero2": {"deepseek_v3": "free", "lfm2_moe": "free"},
    "zero3": {"qwen3_next": "free", "mamba2": "free", "lfm2_moe": "packs"},
}
"""Which architectures a strategy trains, and the variant of each."""


def case(kind: str) -> Case:
    """Return an architecture's job: its small model, trained on questions and answers of varying length."""
    values = {name: each for name, each in small_values(kind).items() if name not in LEFT_OUT}
    model = f"from_config: {{model_type: {kind}, values: {json.dumps(values)}}}"
    start, _, rest = SFT.partition("  from_config:")
    job = f"{start}  {model}\n  tokenizer:{rest.partition('  tokenizer:')[2]}".replace("runs/sft", f"runs/{kind}")
    return Case(kind, job, conversations, "loss", loss_of_answers, variants=OF_SINGLE[kind])


CASES = {kind: case(kind) for kind in OF_SINGLE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("decoders")
    prepare(CASES.values(), place)
    return place


@pytest.fixture(scope="module")
def single(folder):
    """The runs on one process, by architecture and variant."""
    return launch(None, [(CASES[kind], each) for kind, variants in OF_SINGLE.items() for each in variants], folder)


@pytest.mark.parametrize("kind", OF_SINGLE)
def test_batches_without_padding_have_the_losses_of_padded_ones(single, folder, kind):
    ours, theirs = single[kind, "free"], single[kind, "padded"]
    assert ours.error is None
    assert theirs.error is None
    assert len(ours.losses) == 4
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], rel=1e-4)
    log = (folder / "single.log").read_text()
    assert "padding-free batches: the model keeps the samples of a row apart" in log
    assert "samples are padded: " not in log


@pytest.mark.parametrize("strategy", SPREAD)
def test_every_strategy_has_the_losses_of_one_process(single, folder, strategy):
    spread = launch(strategy, [(CASES[kind], variant) for kind, variant in SPREAD[strategy].items()], folder)
    assert len(spread) == len(SPREAD[strategy])
    for (kind, variant), many in spread.items():
        one = single[kind, variant]
        assert one.error is None
        assert many.error is None
        assert len(many.losses) == 4
        assert many.losses == pytest.approx(one.losses, rel=1e-4), kind
        assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4), kind
