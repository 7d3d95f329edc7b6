"""Sizes of ZeRO's buckets, from the model's: left to DeepSpeed, they hold half a billion numbers on any model."""

from collections.abc import Mapping

from accelerate import Accelerator
from torch import nn

from finetune.runtime.parameters import full_numel

SMALLEST = 25 * 2**20 // 4
"""Numbers of a bucket that is worth a message: DDP's 25 MiB in float32."""


def fill_buckets(accelerator: Accelerator, model: nn.Module) -> None:
    """Fill in the sizes that the DeepSpeed config leaves out or calls `auto`; call it before the model is prepared."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    zero = plugin.deepspeed_config["zero_optimization"]
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    num_trained = sum(full_numel(each) for each in model.parameters() if each.requires_grad)
    found = bucket_sizes(num_trained=num_trained, width=width if isinstance(width, int) else 0, stage=zero["stage"])
    zero.update({name: size for name, size in found.items() if zero.get(name, "auto") == "auto"})


def bucket_sizes(*, num_trained: int, width: int, stage: int) -> Mapping[str, int]:
    """Return the sizes in numbers, by DeepSpeed's names.

    A bucket is reduced while the backward pass goes on: it holds about a matrix of the model (Trainer's choice too), in
    a small model as much as makes a message worth while, and never more than there is.
    """
    bucket = max(1, min(max(width * width, SMALLEST), num_trained))
    sizes = {"reduce_bucket_size": bucket}
    if stage == 3 and width:
        sizes |= {"stage3_prefetch_bucket_size": int(0.9 * bucket), "stage3_param_persistence_threshold": 10 * width}
    return sizes
