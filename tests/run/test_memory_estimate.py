"""What a rank needs is estimated before it trains, and stands beside what it has taken."""

import re

import pytest

SIZES = "hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, num_attention_heads: 4"
LARGER = f"model.from_config={{model_type: llama, values: {{{SIZES}, tie_word_embeddings: true}}}}"
LINE = re.compile(r"memory: estimated ([\d.]+) (MB|GB), measured peak ([\d.]+) (MB|GB)")
CASES = {
    "full": (None, ()),
    "recomputed": (None, ("model.gradient_checkpointing=true",)),
    "lora": (None, ("model.lora={rank: 4}",)),
    "ddp": ("ddp", ()),
    "fsdp2": ("fsdp2", ()),
    "zero2": ("zero2", ()),
    "zero3 with LoRA": ("zero3", ("model.lora={rank: 4}",)),
}


def numbers(output):
    match = LINE.search(output)
    assert match is not None, output[-2000:]
    return [float(match[place]) * {"MB": 1e6, "GB": 1e9}[match[place + 1]] for place in (1, 3)]


@pytest.mark.parametrize("case", ["full", *(pytest.param(name, marks=pytest.mark.full) for name in list(CASES)[1:])])
def test_the_estimate_is_near_the_measured_peak(launch, figure, case):
    """On a CPU most of it is the process itself, whose libraries are imported after it was measured, too."""
    strategy, overrides = CASES[case]
    settings = (LARGER, "train.steps=3", "train.schedule={name: constant}", "evaluate=null", "data.validation=null")
    ended = launch(strategy, name=f"memory {case}", overrides=(*settings, *overrides))
    assert ended.code == 0, ended.output
    estimated, measured = numbers(ended.output)
    figure(f"{case}: measured peak of the estimated", measured / estimated, at_most=1.35, at_least=0.75)
