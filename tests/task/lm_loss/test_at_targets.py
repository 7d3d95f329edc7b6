"""The head at target positions alone: the same losses and gradients as from all logits, and none of these."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.task.lm_loss import chunked_loss, target_loss
from finetune.task.lm_loss.head import find_lm_head
from finetune.task.lm_loss.logit_transform import LogitTransform, find_logit_transform, is_rowwise
from finetune.task.lm_loss.target_loss import TargetLoss, log_probabilities_at_targets
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.model_inputs import collate_padded, collate_padding_free, forward_logits

VOCABULARY = 151
PLAIN, SMOOTHED = TokenLoss(), TokenLoss(label_smoothing=0.1, z_loss=0.01)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
DECODER = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
ENCODER = {**SIZES, "intermediate_size": 48, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY}
BART = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCABULARY},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}

CAUSAL = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**DECODER)),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**DECODER)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**DECODER, final_logit_softcapping=3.0)),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**DECODER)),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig(**DECODER, logit_scale=0.3)),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig(**DECODER, logits_scaling=6.0)),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2)),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig(**OPT)),
    "falcon": (hf.FalconForCausalLM, hf.FalconConfig(**SIZES, bos_token_id=1, eos_token_id=1)),
}
"""Soft-capping, scales and tied heads among them."""

OTHERS = {
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**ENCODER)),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**T5, decoder_start_token_id=0)),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**BART)),
}


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    """Let twenty-odd targets be several slabs."""
    monkeypatch.setattr(target_loss, "MAX_FULL_LOGITS", 0)
    monkeypatch.setattr(chunked_loss, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setitem(chunked_loss.CHUNK_BYTES, "cpu", 0)


def made(name):
    torch.manual_seed(0)
    kind, config = {**CAUSAL, **OTHERS}[name]
    config = copy.deepcopy(config)
    config.attn_implementation = "eager"
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and buffers of zeros would prove nothing
    return model


def samples(*lengths, share=0.6):
    draw = np.random.default_rng(3)
    return [
        Features({"input_ids": draw.integers(2, VOCABULARY, n).astype(np.uint32), "is_target": draw.random(n) < share})
        for n in lengths
    ]


def sums_and_gradients(loss, model, batch, inputs=None):
    """Return the sums and the gradients of all trained parameters."""
    model.zero_grad()
    sums = loss.sums(model, batch, inputs)
    (sums["loss_sum"] * 0.37).backward()
    return sums, {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def assert_same(one, other):
    (sums, gradients), (wanted_sums, wanted) = one, other
    assert sums.keys() == wanted_sums.keys()
    for name, value in wanted_sums.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == wanted.keys()
    steepest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    for name, gradient in wanted.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            largest = max(float(gradient.abs().max()), 0.01 * steepest)  # a bias of keys has none but rounding
            assert float((gradients[name] - gradient).abs().max()) <= 2e-6 * largest, name


def assert_same_as_from_all_logits(model, batch, loss=PLAIN, inputs=None):
    assert_same(
        sums_and_gradients(TargetLoss(loss), model, batch, inputs),
        sums_and_gradients(TargetLoss(loss, "plain"), model, batch, inputs),
    )


@pytest.mark.parametrize("loss", [PLAIN, SMOOTHED], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", CAUSAL)
def test_losses_and_gradients_are_those_of_all_logits(name, loss):
    model = made(name)
    assert find_lm_head(model).transform is not None
    for batch in (collate_padded(samples(9, 4, 21), pad_id=0), collate_padded(samples(5, share=1.0), pad_id=0)):
        assert_same_as_from_all_logits(model, batch, loss)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_loss_at_targets_equals_the_plain_loss_in_packed_rows(name):
    model, batch = made(name), collate_padding_free(samples(9, 4, 21))
    assert_same_as_from_all_logits(model, batch)


@pytest.mark.parametrize("loss", [PLAIN, SMOOTHED], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", OTHERS)
def test_loss_at_targets_equals_the_plain_loss_in_other_models(name, loss):
    model, batch = made(name), collate_padded(samples(9, 4, 21), pad_id=0)
    inputs = {**batch.inputs, "use_cache": False} if name != "bert" else dict(batch.inputs)
    if name != "bert":
        inputs["decoder_input_ids"] = batch.inputs["input_ids"]
    assert_same_as_from_all_logits(model, batch, loss, inputs)
    assert (find_lm_head(model).transform is None) == (
        name == "bart"
    )  # to whose logits a bias is added: they are picked


@pytest.mark.parametrize("modules", [["q_proj"], ["q_proj", "lm_head"]])
def test_loss_at_targets_equals_the_plain_loss_with_adapters(modules):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=modules, init_lora_weights=False))
    batch = collate_padded(samples(9, 4, 21), pad_id=0)
    assert_same_as_from_all_logits(model, batch)
    saved = peft.get_peft_model(made("gemma2"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert_same_as_from_all_logits(saved, batch)


def test_trained_prompt_tokens_before_the_text_are_not_targets():
    peft = pytest.importorskip("peft")
    kind = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, batch = peft.get_peft_model(made("llama"), kind), collate_padded(samples(9, 4, 21), pad_id=0)
    assert_same_as_from_all_logits(model, batch)


def test_a_frozen_head_gets_no_gradient():
    model, batch = made("llama"), collate_padded(samples(9, 4, 21), pad_id=0)
    model.lm_head.requires_grad_(False)
    assert_same_as_from_all_logits(model, batch)
    assert model.lm_head.weight.grad is None


def test_a_batch_without_targets_has_a_gradient_of_zeros_everywhere():
    model, batch = made("llama"), collate_padded(samples(9, 4), pad_id=0)
    empty = copy.copy(batch)
    object.__setattr__(empty, "targets", batch.targets.none)
    sums, gradients = sums_and_gradients(TargetLoss(PLAIN), model, empty)
    assert sums["loss_sum"].item() == 0.0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("least", [8, 512])
def test_log_probabilities_may_weigh_on_a_loss_one_by_one(least, monkeypatch):
    monkeypatch.setattr(chunked_loss, "MIN_CHUNK_ROWS", least)  # slabs that are worked out again, and one that is kept
    model, batch = made("gemma2"), collate_padded(samples(9, 4, 21), pad_id=0)
    weights = torch.randn(len(batch.targets.labels), generator=torch.Generator().manual_seed(1))
    found = []
    for each in (log_probabilities_at_targets(model, batch), _by_all_logits(model, batch)):
        model.zero_grad()
        (each * weights).sum().backward()
        found.append((each.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for name, wanted in found[1][1].items():
        assert float((found[0][1][name] - wanted).abs().max()) <= 2e-6 * max(1.0, float(wanted.abs().max())), name


def test_metrics_at_targets_equal_those_of_all_logits():
    model, batch = made("gemma2"), collate_padded(samples(9, 4, 21), pad_id=0)
    logits, is_target = forward_logits(model, batch), batch.labels != IGNORED
    with torch.no_grad():
        sums = TargetLoss(SMOOTHED).evaluation_sums(model, batch)
    assert int(sums["num_correct"]) == int(((logits.argmax(-1) == batch.labels) & is_target).sum())
    assert int(sums["num_targets"]) == int(is_target.sum())
    plain = TargetLoss(PLAIN, "plain").sums(model, batch)["loss_sum"]
    torch.testing.assert_close(sums["loss_sum"], plain.detach(), rtol=1e-6, atol=1e-6)


def test_outputs_cut_to_half_floats_cut_no_loss():
    """FSDP2 under bf16 hands out half floats; the loss and its gradient go round them."""
    model, batch = made("llama"), collate_padded(samples(9, 4, 21), pad_id=0)
    wanted = sums_and_gradients(TargetLoss(PLAIN, "plain"), model, batch)

    def halved(module, given, outputs):
        outputs.logits = outputs.logits.bfloat16()
        return outputs

    with model.register_forward_hook(halved):
        assert_same(sums_and_gradients(TargetLoss(PLAIN), model, batch), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_in_half_floats_the_loss_is_as_near_to_that_of_full_ones_as_from_all_logits(name):
    model, batch = made(name), collate_padded(samples(9, 4, 21), pad_id=0)
    sums, exact = sums_and_gradients(TargetLoss(PLAIN, "plain"), model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = sums_and_gradients(TargetLoss(PLAIN, "plain"), model, batch)
        ours = sums_and_gradients(TargetLoss(PLAIN), model, batch)
    assert ours[0]["loss_sum"].dtype == torch.float32
    assert ours[0]["loss_sum"].item() == pytest.approx(sums["loss_sum"].item(), rel=3e-3)

    def error(gradients):
        return sum(float((gradients[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert all(gradient.dtype == torch.float32 for gradient in ours[1].values())
    assert error(ours[1]) < 1.2 * error(theirs[1])


@pytest.mark.parametrize("loss", [PLAIN, SMOOTHED], ids=["plain", "smoothed"])
def test_no_tensor_of_all_logits_is_ever_made(loss):
    model, batch = made("llama"), collate_padded(samples(40, 64, 50), pad_id=0)
    whole = batch.labels.numel() * VOCABULARY
    with _Largest() as plain:
        sums_and_gradients(TargetLoss(loss, "plain"), model, batch)
    with _Largest() as ours:
        sums_and_gradients(TargetLoss(loss), model, batch)
    assert plain.num_elements >= whole  # the counter counts
    assert ours.num_elements < whole / 2  # of attention
    assert ours.num_elements < len(batch.targets.labels) * VOCABULARY  # nor of all targets'


def test_all_logits_are_computed_if_they_are_few(monkeypatch):
    model, batch = made("llama"), collate_padded(samples(9, 4, 21), pad_id=0)
    whole = batch.labels.numel() * VOCABULARY
    monkeypatch.setattr(target_loss, "MAX_FULL_LOGITS", whole)
    with _Largest() as largest:
        few = sums_and_gradients(TargetLoss(PLAIN), model, batch)
    assert largest.num_elements >= whole
    assert_same(few, sums_and_gradients(TargetLoss(PLAIN, "chunked"), model, batch))


def test_the_transform_of_a_heads_output_is_read_from_the_config_and_confirmed_by_the_forward():
    models = {name: made(name) for name in (*CAUSAL, *OTHERS)}
    found = {name: find_logit_transform(model, model.get_output_embeddings()) for name, model in models.items()}
    assert found["gemma2"] == LogitTransform(soft_cap=3.0)
    assert found["granite"] == LogitTransform(scale=1 / 6)
    assert found["cohere"] == LogitTransform(scale=0.3)
    assert found["bart"] is None  # a bias is added to each row
    assert is_rowwise(models["bart"], models["bart"].get_output_embeddings())
    others = set(found) - {"gemma2", "granite", "cohere", "bart"}
    assert {found[name] for name in others} == {LogitTransform()}


def test_a_transform_that_the_config_does_not_name_is_not_guessed():
    named = made("cohere")
    named.logit_scale = 0.7
    assert find_logit_transform(named, named.lm_head) is None
    assert find_lm_head(named).transform is None and find_lm_head(named).is_rowwise


def test_the_class_that_fsdp2_makes_of_a_model_is_not_constructed_again():
    class Sharded(hf.LlamaForCausalLM):
        def __new__(cls, *values, **named):
            raise AssertionError("constructed")

    model = made("llama")
    model.__class__ = Sharded
    assert find_logit_transform(model, model.lm_head) == LogitTransform()


def test_a_model_that_does_something_else_with_its_logits_is_asked_for_all_of_them():
    class Odd(hf.LlamaForCausalLM):
        def forward(self, *values, **named):
            outputs = super().forward(*values, **named)
            outputs.logits = outputs.logits - outputs.logits.mean(dim=1, keepdim=True)  # over positions
            return outputs

    torch.manual_seed(0)
    model, batch = Odd(hf.LlamaConfig(**DECODER)), collate_padded(samples(9, 4, 21), pad_id=0)
    assert find_lm_head(model).transform is None and not find_lm_head(model).is_rowwise
    assert_same_as_from_all_logits(model, batch)


def test_a_head_is_itself_again_after_a_pass_that_failed():
    model, batch = made("llama"), collate_padded(samples(9), pad_id=0)

    def fail(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError), model.model.register_forward_hook(fail):
        TargetLoss(PLAIN).sums(model, batch)
    assert "forward" not in model.lm_head.__dict__
    assert forward_logits(model, batch).shape == (1, 9, VOCABULARY)


class _Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that comes out of an operation."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for each in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return outputs


def _by_all_logits(model, batch):
    logits = forward_logits(model, batch)[batch.labels != IGNORED]
    return logits.log_softmax(-1).gather(1, batch.targets.labels[:, None]).squeeze(1)
