"""How large a model is and how much of it learns, in numbers that can be printed."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from finetune.runtime.amounts import size_text
from finetune.runtime.parameters import full_numel, num_values

_ADAPTED = re.compile(r"(.+?)\.(?:lora_|ia3_l|oft_R)")


@dataclass(frozen=True)
class ModelSize:
    """Counts over the whole model, whatever part of it this rank holds; a tied parameter counts once."""

    num_parameters: int
    num_trained: int
    num_adapted_modules: int
    bytes_by_dtype: Mapping[str, int]
    trained_bytes_by_dtype: Mapping[str, int]
    largest_trained_bytes: int = 0  # of one parameter

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the sentences for the reader."""
        share = 100 * self.num_trained / max(self.num_parameters, 1)
        place = f", in adapters on {self.num_adapted_modules} modules" if self.num_adapted_modules else ""
        held = ", ".join(f"{size_text(size)} in {dtype}" for dtype, size in self.bytes_by_dtype.items())
        return (
            f"trained: {self.num_trained:,} of {self.num_parameters:,} parameters ({share:.2f}%){place}",
            f"weights: {held}",
        )


def describe(model: nn.Module) -> ModelSize:
    """Return the model's size; parameters that ZeRO-3 has partitioned count in full."""
    bytes_by_dtype: Counter[str] = Counter()
    trained_bytes: Counter[str] = Counter()
    num_parameters = num_trained = largest = 0
    for parameter in model.parameters():
        count = full_numel(parameter)
        dtype = str(parameter.dtype).removeprefix("torch.")
        num_parameters += num_values(parameter)
        bytes_by_dtype[dtype] += count * parameter.element_size()
        if parameter.requires_grad:
            num_trained += count
            trained_bytes[dtype] += count * parameter.element_size()
            largest = max(largest, count * parameter.element_size())
    return ModelSize(
        num_parameters, num_trained, _num_adapted(model), dict(bytes_by_dtype), dict(trained_bytes), largest
    )


def _num_adapted(model: nn.Module) -> int:
    """Count the modules of the base that have an adapter, whatever its kind; what is trained in full is none."""
    return len({match[1] for name, _ in model.named_parameters() if (match := _ADAPTED.match(name))})
