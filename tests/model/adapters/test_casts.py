import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.sections.model import LoraSection
from finetune.model.adapters import build as building
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.ground import Ground
from finetune.runtime.construction import Construction


class Widened(TorchDispatchMode):
    """Counts casts of 16-bit activations to float32."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16 and args[0].dim() == 3:
            self.num += out.dtype == torch.float32
        return out


def learnt(model):
    """Return what one batch teaches in bf16 arithmetic, and how many activations were widened on the way."""
    ids = torch.arange(24).view(2, 12)
    with Widened() as widened, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], widened.num


@pytest.mark.parametrize(("lora", "is_left"), [({}, True), ({"dropout": 0.1}, False), ({"dora": True}, False)])
def test_an_input_is_not_widened_for_autocast_to_round_it_back(build, from_config, monkeypatch, lora, is_left):
    found = []
    for is_ours in (True, False):
        if not is_ours:
            monkeypatch.setattr(building, "leave_casts_to_autocast", lambda model: None)
        ground = Ground(seed=7, head="causal_lm", revision=None, construction=Construction())
        model = add_adapter(build(from_config(dtype="bfloat16")), LoraSection(rank=4, **lora), ground)
        torch.manual_seed(0)
        for weight in (p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(weight, std=0.1)
        found.append(learnt(model))
    (loss, gradients, num), (expected, others, num_before) = found
    assert torch.equal(loss, expected)
    assert len(gradients) == len(others) >= 2 * 14
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
    assert (num_before - num >= 14) if is_left else (num_before == num)


def test_without_autocast_an_adapter_gets_its_own_type(build, from_config):
    ground = Ground(seed=7, head="causal_lm", revision=None, construction=Construction())
    model = add_adapter(build(from_config(dtype="bfloat16")), LoraSection(rank=4), ground)
    assert model(input_ids=torch.arange(6)[None]).logits.isfinite().all()
