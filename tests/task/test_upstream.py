"""Each workaround is still needed: where a test fails, the library has mended it and the workaround can go."""

import torch
from torch import nn

from finetune.task.upstream import through_wrappers


class Wrapper(nn.Module):
    """Counts the forward passes that go through it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.num_forwards = 0

    def forward(self, **inputs):
        self.num_forwards += 1
        return self.module(**inputs)


def test_generate_bypasses_the_wrappers_of_its_model(model):
    wrapped, inputs = Wrapper(model), {"input_ids": torch.tensor([[5, 17]]), "max_new_tokens": 3, "do_sample": False}
    plain = model.generate(**inputs, eos_token_id=None)
    assert wrapped.num_forwards == 0
    with through_wrappers(wrapped, model):
        assert torch.equal(model.generate(**inputs, eos_token_id=None), plain)
    assert wrapped.num_forwards == 3
    assert "forward" not in vars(model)
