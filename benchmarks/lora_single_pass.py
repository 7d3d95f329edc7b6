"""Memory, operations and time of a step with LoRA in one pass and with peft's own layers, on the same weights.

    python benchmarks/lora_single_pass.py [--rounds 7] [--hidden 512] [--layers 4]

A small llama with adapters of rank 16 on every linear layer. Kept: bytes that the forward pass saves for the backward
pass, without parameters. Peak: of the bytes allocated in a step. Operations: those of a step that compute something, by
torch's profiler on the CPU, each about one launch on a GPU (dropout is three, on a GPU one); views and allocations do
not count. Time: the median ratio over rounds that run both in random order, with quartiles.
"""

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402  # the threads are set before
from torch import Tensor  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.profiler import profile  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from finetune.config.sections.model import LoraSection  # noqa: E402
from finetune.model.adapters.build import add_adapter  # noqa: E402
from finetune.model.adapters.context import AdapterContext  # noqa: E402
from finetune.model.adapters.single_pass import use_single_pass  # noqa: E402

# fmt: off
_FREE = frozenset({
    "view", "view_as", "reshape", "_reshape_alias", "_unsafe_view", "flatten", "unflatten", "t", "transpose", "permute",
    "numpy_T", "movedim", "as_strided", "expand", "expand_as", "slice", "select", "split", "split_with_sizes", "narrow",
    "unsqueeze", "squeeze", "unbind", "chunk", "detach", "alias", "contiguous", "to", "lift_fresh", "set_", "resize_",
    "empty", "empty_like", "empty_strided", "new_empty", "result_type", "resolve_conj", "resolve_neg", "item",
    "_local_scalar_dense", "is_nonzero", "matmul", "linear",
})
# fmt: on


def run(model: Any, ids: Tensor, *, is_bf16: bool) -> Tensor:
    """Return the loss."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def kept_bytes(model: Any, forward: Callable[[Any], Tensor]) -> int:
    """Return the bytes that a forward pass keeps."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


def num_operations(event: Any) -> int:
    """Return the number of operations in a profiler's event that compute something: those in it, or itself."""
    inner = sum(map(num_operations, event.cpu_children))
    name = event.name.removeprefix("aten::")
    return inner or int(name != event.name and name not in _FREE)


def measure(model: Any, forward: Callable[[Any], Tensor]) -> tuple[int, int, int]:
    """Return the kept bytes, the peak of allocated bytes, and the operations of a step."""
    forward(model).backward()
    model.zero_grad()
    with profile(profile_memory=True) as profiled:
        forward(model).backward()
    live, peak = 0, 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    operations = sum(num_operations(event) for event in profiled.events() if event.cpu_parent is None)
    return kept_bytes(model, forward), peak, operations


def main() -> None:
    """Print a row per setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    )
    ids = torch.randint(0, 512, (4, 256), generator=torch.Generator().manual_seed(0))
    print("| precision | dropout | kept, MB: peft, one pass | peak, MB | operations | time, one pass / peft |")
    print("|---|---|---|---|---|---|")
    for is_bf16, dropout in ((False, 0.0), (False, 0.05), (True, 0.0), (True, 0.05)):
        torch.manual_seed(0)
        base = LlamaForCausalLM(config).to(torch.bfloat16 if is_bf16 else torch.float32)
        plain: Any = add_adapter(base, LoraSection(rank=16, dropout=dropout), AdapterContext(seed=1)).train()
        model = copy.deepcopy(plain)
        use_single_pass(model, in_place=True)

        def forward(model: Any, is_bf16: bool = is_bf16) -> Tensor:
            return run(model, ids, is_bf16=is_bf16)

        before, after = measure(plain, forward), measure(model, forward)
        ratios = []
        for _ in range(options.rounds):
            seconds = {}
            for each in random.sample((plain, model), 2):
                start = time.process_time()
                forward(each).backward()
                seconds[each is model] = time.process_time() - start
            ratios.append(seconds[True] / seconds[False])
        low, median, high = statistics.quantiles(ratios, n=4)
        kept, peak = (f"{before[i] / 1e6:.1f}, {after[i] / 1e6:.1f} ({after[i] / before[i]:.2f})" for i in (0, 1))
        precision = "bf16" if is_bf16 else "fp32"
        counts = f"{before[2]}, {after[2]} ({after[2] / before[2]:.2f})"
        spread = f"{median:.2f} ({low:.2f}-{high:.2f})"
        print(f"| {precision} | {dropout} | {kept} | {peak} | {counts} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
