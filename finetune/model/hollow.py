"""Models without values: a rank that is sent its weights later builds only their places."""

import torch
from torch import nn
from transformers import PreTrainedModel


def give_places(model: PreTrainedModel) -> None:
    """Replace parameters on the meta device by unfilled ones on the CPU; ties hold, buffers keep their values.

    Nothing is written to the new memory, so it costs nothing before the weights arrive.
    """
    places: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in places:
                    places[parameter] = _place(parameter)
                module._parameters[name] = places[parameter]
    hollow = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not hollow, f"buffers must be built with their values, but {hollow} are on the meta device"
    model.tie_weights()  # a context that moves parameters to the meta device one by one parts the tied ones


def _place(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)
