"""Prints what lives between both passes with liger's kernels, in Triton's interpreter, and with their stand-ins.

Started by test_predict.py.
"""

import copy
import gc
import json
import sys
from typing import Any

import torch

from tests.model.kernels import triton_on_cpu  # noqa: F401  # before triton is imported

# isort: split
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.memory.fake_model import FUSED_FUNCTIONS
from finetune.memory.tracer import LiveBytes
from finetune.model.kernels.fused_layers import fuse_layers
from tests.model.kernels.fused_on_cpu import SIZE


def measure(plain: torch.nn.Module, **options: Any) -> int:
    """Return the bytes that live between both passes of a copy; with options, of one with kernels."""
    with LiveBytes() as live:
        model, states = copy.deepcopy(plain), torch.randn(2, 64, SIZE["hidden_size"], dtype=torch.bfloat16)
        if options:
            fuse_layers(model, fuses_rotary=False, **options)
        before = live.now
        output = model(inputs_embeds=states).last_hidden_state.sum()
        gc.collect()  # the interpreter refers to what it was called with
        held = live.now - before
        output.backward()
    return held


def main(model_type: str) -> None:
    """Measure a model of this type."""
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZE), dtype=torch.bfloat16).model
    fused, planned = measure(plain, stand_ins=None), measure(plain, stand_ins=FUSED_FUNCTIONS)
    print(json.dumps({"plain": measure(plain), "fused": fused, "planned": planned}))


if __name__ == "__main__":
    main(sys.argv[1])
