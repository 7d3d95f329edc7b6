"""Answers are greedy, whatever wraps the model and whatever its own generation settings say."""

from itertools import zip_longest

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from finetune.errors import ModelError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.task.generation import generate_tokens
from finetune.task.protocol import GenerationPrompt
from tests.devices import EVERY_DEVICE
from tests.model.attention.small_models import tiny_model
from tests.refusals import refused
from tests.task.lm_loss.test_at_targets import CAUSAL, OTHERS
from tests.task.lm_loss.test_at_targets import made as small_model

PROMPTS = [(5, 17, 100, 31), (7,), (90, 91, 92, 93, 94, 95, 96, 97)]
PAD = 0


def answer(model, prompts=PROMPTS, *, stop_ids=frozenset(), max_new_tokens=12):
    return generate_tokens(
        model,
        [GenerationPrompt(input_ids=prompt, reference_ids=()) for prompt in prompts],
        pad_id=PAD,
        stop_ids=frozenset(stop_ids),
        max_new_tokens=max_new_tokens,
        device=torch.device("cpu"),
    )


@torch.no_grad()
def likeliest_tokens(model, prompt, *, num_tokens=12):
    """Return the tokens by reading everything again for each of them, one prompt alone and without a cache."""
    is_pair, tokens = model.config.is_encoder_decoder, []
    start = model.config.decoder_start_token_id if is_pair else None
    for _ in range(num_tokens):
        source = torch.tensor([prompt if is_pair else [*prompt, *tokens]])
        target = {"decoder_input_ids": torch.tensor([[start, *tokens]])} if is_pair else {}
        tokens.append(int(model(input_ids=source, use_cache=False, **target).logits[0, -1].argmax()))
    return tokens


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_answers_are_those_of_the_cpu(device, kind, figure):
    """An evaluation's and `generate`'s, in float32 without TF32, with padded prompts and our attention."""
    sizes, num_tokens = {}, 12
    if device == "cuda":
        num_tokens = 64
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
        sizes |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.1}
    prompts = [[each % 97 for each in prompt] for prompt in PROMPTS]
    found, precision = {}, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for place in ("cpu", device):
        model = tiny_model(kind, **sizes).to(place)
        asked = [GenerationPrompt(input_ids=tuple(prompt), reference_ids=()) for prompt in prompts]
        how = {"pad_id": PAD, "stop_ids": frozenset()}
        evaluated = generate_tokens(model, asked, max_new_tokens=num_tokens, device=torch.device(place), **how)
        sampling = SamplingParams(max_new_tokens=num_tokens)
        generated = generate_batch(model, prompts, [1, 2, 3], sampling=sampling, **how)
        found[place] = [*evaluated, *generated]
    torch.set_float32_matmul_precision(precision)
    assert len({token for row in found["cpu"] for token in row}) > 2
    pairs = [each for rows in zip(found["cpu"], found[device], strict=True) for each in zip_longest(*rows)]
    assert len(pairs) >= 3 * num_tokens
    figure(f"greedy tokens unlike the CPU's, {kind} ({device})", sum(one != other for one, other in pairs), at_most=0)


@pytest.mark.parametrize("name", [*CAUSAL, "t5", "bart"])
def test_answers_of_a_batch_are_the_likeliest_tokens_of_each_prompt(name):
    model = small_model(name)
    assert name in {**CAUSAL, **OTHERS}
    assert answer(model) == [likeliest_tokens(model, prompt) for prompt in PROMPTS]
    assert len({token for row in answer(model) for token in row}) > 1


def test_an_answer_ends_with_its_stop_token(model):
    free = answer(model)
    stop = free[0][3]
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert answer(model, stop_ids={stop}) == wanted
    assert len(wanted[0]) < len(free[0])


class Wrapper(nn.Module):
    """Counts the forward passes that go through it, as DDP, an engine or peft's model wrap another one."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.num_forwards = 0

    def forward(self, *args, **kwargs):
        self.num_forwards += 1
        return self.module(*args, **kwargs)


@pytest.mark.parametrize(("name", "num_forwards"), [("llama", 12), ("t5", 13)])
def test_every_forward_pass_goes_through_the_wrapper(name, num_forwards):
    model = small_model(name)
    wrapped = Wrapper(model)
    assert answer(wrapped) == answer(model)
    assert wrapped.num_forwards == num_forwards  # an encoder is run once more by itself
    assert "forward" not in vars(model)


def test_the_models_own_generation_settings_do_not_count_and_are_kept(model):
    wanted = answer(model)
    own = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=9.0, suppress_tokens=[wanted[0][0]])
    before, model.generation_config = model.generation_config, own
    try:
        assert answer(model) == wanted
        assert model.generation_config is own
    finally:
        model.generation_config = before


def test_a_model_that_cannot_generate_is_refused():
    with refused(ModelError, "Linear"):
        answer(nn.Linear(2, 2))
