"""Facts about a parameter that hold whether it is whole here or split over ranks."""

import math
import re

import torch
from torch import nn

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter; DeepSpeed's ZeRO-3 leaves an empty one and keeps the shape beside it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of the whole parameter."""
    return math.prod(full_shape(parameter))


def num_values(parameter: nn.Parameter) -> int:
    """Return how many numbers the whole parameter stands for; one of bitsandbytes' packs several into each element."""
    packed = getattr(parameter, "quant_state", None)
    return full_numel(parameter) if packed is None else math.prod(packed.shape)


def canonical_name(name: str) -> str:
    """Return the parameter's name in the plain model, without what wrappers put in front of it or into it."""
    return _WRAPPERS.sub("", name)
