"""Layers whose parameters are gathered while the layer before them computes."""

from itertools import pairwise

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from finetune.strategy.fsdp2 import fsdp2_plugin


def prefetch_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Have each layer under FSDP2 ask for the next one's parameters before it computes; the model is prepared.

    Without it the host asks when it comes to a layer, which is early enough unless the host is the slower of the two.
    It is done where `fsdp_forward_prefetch: true` says so, and holds one more layer whole. Only layers of one list ask
    for one another: what was asked for and not used would still be there, as it was, after the weights have changed.
    """
    plugin = fsdp2_plugin(accelerator)
    if plugin is None or not plugin.forward_prefetch:
        return
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer, following in pairwise(each for each in layers if isinstance(each, FSDPModule)):
                layer.set_modules_to_forward_prefetch([following])
