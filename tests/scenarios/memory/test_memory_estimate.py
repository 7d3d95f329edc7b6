"""The memory that a rank needs before activations is counted before it trains, and printed with its measured peak."""

import re

import pytest

SIZES = "hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, num_attention_heads: 4"
LARGER = f"model.from_config={{model_type: llama, values: {{{SIZES}, tie_word_embeddings: true}}}}"
COUNTED = re.compile(r"memory: ([\d.]+) (MB|GB) per rank = ")
MEASURED = re.compile(r"memory: .*, measured peak ([\d.]+) (MB|GB)")
CASES = {
    "full": (None, ()),
    "recomputed": (None, ("model.gradient_checkpointing=true",)),
    "fsdp2": ("fsdp2", ()),
    "zero3 with LoRA": ("zero3", ("model.lora={rank: 4}",)),
}


def read_bytes(pattern, output):
    match = pattern.search(output)
    assert match is not None, output[-2000:]
    return float(match[1]) * {"MB": 1e6, "GB": 1e9}[match[2]]


@pytest.mark.parametrize("case", ["full", *(pytest.param(name, marks=pytest.mark.full) for name in list(CASES)[1:])])
def test_the_counted_memory_is_near_the_measured_peak_of_a_small_job(launch, figure, case):
    """On a CPU most of it is the process itself, whose libraries are imported after it was measured, too."""
    strategy, overrides = CASES[case]
    settings = (LARGER, "train.steps=3", "train.schedule={name: constant}", "evaluate=null", "data.validation=null")
    ended = launch(strategy, name=f"memory {case}", overrides=(*settings, *overrides))
    assert ended.code == 0, ended.output
    counted, measured = read_bytes(COUNTED, ended.output), read_bytes(MEASURED, ended.output)
    figure(f"{case}: measured peak over the counted memory", measured / counted, at_most=1.35, at_least=0.75)
