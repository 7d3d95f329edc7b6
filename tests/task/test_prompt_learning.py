"""Trained positions before the text are in no loss, and answers are those of one prompt at a time."""

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.data.batch import Batch
from finetune.task.generation import generate_tokens
from finetune.task.lm_loss.head import logits_everywhere
from finetune.task.protocol import GenerationPrompt

PROMPTS = [(5, 17, 20, 31), (7,), (9, 10, 11, 12, 13, 14)]
CONFIGS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.fixture(params=sorted(CONFIGS))
def model(request):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, num_key_value_heads=2, **sizes))
    return get_peft_model(base, CONFIGS[request.param]).eval()


def test_logits_stand_where_the_tokens_stand(model):
    short, long = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    alone = Batch({"input_ids": short, "attention_mask": torch.ones_like(short)}, short, 3, 3, (0,))
    padded = Batch({"input_ids": long, "attention_mask": mask}, long, 3, 3, (0,))
    assert logits_everywhere(model, alone).shape == (1, 3, 40)
    assert torch.allclose(logits_everywhere(model, padded)[:, :3], logits_everywhere(model, alone), atol=1e-5)


def test_answers_are_the_most_likely_tokens_of_whole_forward_passes(model):
    """Not those of peft's `generate`: peft 0.21.2 passes its prefix by an argument that transformers 5.24 renamed."""
    given = {"pad_id": 0, "stop_ids": frozenset(), "max_new_tokens": 6, "device": torch.device("cpu")}
    answers = [generate_tokens(model, [GenerationPrompt(prompt, ())], **given)[0] for prompt in PROMPTS]
    assert len({token for row in answers for token in row}) > 3
    for prompt, row in zip(PROMPTS, answers, strict=True):
        assert greedy_without_cache(model, prompt, num_tokens=len(row)) == row


@torch.no_grad()
def greedy_without_cache(model, prompt, *, num_tokens):
    ids = torch.tensor([prompt])
    for _ in range(num_tokens):
        batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids, ids.shape[1], ids.shape[1], (0,))
        ids = torch.cat([ids, logits_everywhere(model, batch)[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
