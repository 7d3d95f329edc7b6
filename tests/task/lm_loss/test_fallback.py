"""A loss that is not computed as asked says so in one line: what was asked, why not, what is done."""

import pytest
import torch
import transformers as hf
from torch import nn

from finetune.task.lm_loss.target_loss import fallback_warning

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}


class Odd(hf.LlamaForCausalLM):
    """A model that subtracts the mean over positions from its logits."""

    def forward(self, *values, **named):
        outputs = super().forward(*values, **named)
        outputs.logits = outputs.logits - outputs.logits.mean(dim=1, keepdim=True)
        return outputs


class Headless(nn.Module):
    """A model of nobody's kind, whose head nobody can find."""


def llama(kind=hf.LlamaForCausalLM):
    torch.manual_seed(0)
    return kind(hf.LlamaConfig(**SIZES))


@pytest.mark.parametrize("kernel", ["chunked", "liger", "cce"])
def test_a_kernel_that_cannot_be_used_is_named(kernel):
    line = fallback_warning(llama(Odd), "causal_lm", kernel)
    assert line == (
        f"warning: train.loss_kernel: `{kernel}` cannot be used: Odd transforms the output of its head in a way not "
        "described by its config: the loss holds the logits of all positions of a microbatch at once, which needs more "
        "memory"
    )


def test_an_unrequested_loss_kernel_is_not_named_in_the_fallback_warning():
    line = fallback_warning(llama(Odd), "causal_lm", "auto")
    assert line is not None and line.startswith("warning: Odd transforms") and "\n" not in line
    assert fallback_warning(llama(Odd), "causal_lm", "plain") is None  # the logits of all positions were asked for


def test_a_model_without_an_identifiable_head_is_warned_about():
    line = fallback_warning(Headless(), "causal_lm", "chunked")
    assert line is not None and "`chunked` cannot be used: the head of Headless cannot be located" in line
    assert fallback_warning(Headless(), "sequence_classification", "auto") is None


@pytest.mark.parametrize("kernel", ["auto", "chunked", "liger", "cce", "plain"])
def test_a_plain_head_needs_no_warning(kernel):
    assert fallback_warning(llama(), "causal_lm", kernel) is None


def test_a_fused_kernel_that_does_not_support_the_head_is_warned_about_with_the_fallback():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["lm_head"]))
    reason = "does not support a head that is not a single linear layer (adapters, quantization); `chunked` is used"
    assert fallback_warning(adapted, "causal_lm", "liger") == f"warning: train.loss_kernel: `liger` {reason}"
    assert fallback_warning(adapted, "causal_lm", "chunked") is None
    biased = llama()
    biased.lm_head = nn.Linear(16, 31)
    line = fallback_warning(biased, "causal_lm", "cce")
    assert line == "warning: train.loss_kernel: `cce` does not support a head with a bias; `chunked` is used"
    assert fallback_warning(biased, "causal_lm", "liger") is None


def test_adapters_in_a_head_under_zero3_take_the_logits_of_all_targets():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["lm_head"]))
    for number, parameter in enumerate(adapted.base_model.model.lm_head.parameters()):
        parameter.ds_id = number  # as DeepSpeed marks what it has partitioned
    line = fallback_warning(adapted, "causal_lm", "auto")
    assert line is not None and "the logits of all targets of a microbatch at once" in line
