import copy

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.config.sections.model import LoraSection, NewTokensSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.new_tokens import add_embedding_rows, add_tokens, new_token_ids
from finetune.runtime.parameters import InitContext

SECTION = NewTokensSection(tokens=("quokka",), special=("<|tool|>",))
OLDER = 300  # rows of the model, more than the tokenizer has tokens


@pytest.fixture(scope="module")
def plain_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=OLDER,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([f"{a}{b} tool quo" for a in "abcdefgh" for b in "abcdefgh"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    assert len(made) == OLDER
    return made


@pytest.fixture
def tokenizer(plain_tokenizer):
    made = copy.deepcopy(plain_tokenizer)
    add_tokens(made, SECTION)
    return made


def grown(model, tokenizer, **keys):
    section = SECTION.model_copy(update=keys)
    add_embedding_rows(model, tokenizer, section, seed=1, init_context=InitContext())
    return model


def test_new_tokens_are_one_token_each_and_special_ones_are_special(plain_tokenizer, tokenizer):
    assert new_token_ids(tokenizer, SECTION) == (OLDER, OLDER + 1)
    assert tokenizer("a quokka<|tool|>")["input_ids"][-2:] == [OLDER, OLDER + 1]
    assert tokenizer.decode([OLDER, OLDER + 1], skip_special_tokens=True) == "quokka"
    assert len(plain_tokenizer("quokka")["input_ids"]) > 1
    with pytest.raises(ModelError, match="the tokenizer of the run lacks `quokka`"):
        new_token_ids(plain_tokenizer, SECTION)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": ("tool",)}, r"model\.new_tokens\.tokens: `tool` is already in the vocabulary"),
        (
            {"special": ("<|endoftext|>",)},
            r"model\.new_tokens\.special: `<\|endoftext\|>` is already in the vocabulary",
        ),
        ({"tokens": ("quokka", "quokka")}, "listed twice"),
        ({"tokens": ("  ",)}, "whitespace only"),
    ],
)
def test_an_invalid_new_token_is_rejected_by_name(plain_tokenizer, keys, message):
    with pytest.raises(ModelError, match=message):
        add_tokens(copy.deepcopy(plain_tokenizer), NewTokensSection(**keys))


@pytest.mark.parametrize("name", ["llama untied", "llama tied", "gpt2 tied"])
def test_resizing_keeps_older_rows_and_ties_and_updates_the_config(from_config, build, tokenizer, name):
    before = build(from_config(name))
    model = grown(build(from_config(name)), tokenizer)
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (inputs is outputs) == ("untied" not in name)
    assert model.config.vocab_size == len(tokenizer) == len(inputs) == len(outputs)
    assert torch.equal(inputs[:OLDER], before.get_input_embeddings().weight)
    assert torch.equal(outputs[:OLDER], before.get_output_embeddings().weight)
    for weight in (inputs, outputs):
        assert torch.allclose(weight[OLDER:], weight[:OLDER].mean(dim=0).expand(2, -1), atol=1e-6)


def test_rows_may_begin_as_their_pieces_or_as_numbers_of_the_seed_and_the_token(
    from_config, build, plain_tokenizer, tokenizer
):
    rows = grown(build(from_config()), tokenizer, init="pieces").get_input_embeddings().weight
    pieces = plain_tokenizer("quokka")["input_ids"]
    assert torch.allclose(rows[OLDER], rows[pieces].mean(dim=0), atol=1e-6)
    torch.manual_seed(1)
    one = grown(build(from_config()), tokenizer, init="random").get_input_embeddings().weight
    torch.manual_seed(2)
    other = grown(build(from_config()), tokenizer, init="random").get_input_embeddings().weight
    assert torch.equal(one, other)
    assert not torch.equal(one[OLDER], one[OLDER + 1])
    assert one[OLDER:].std().item() == pytest.approx(one[:OLDER].std().item(), rel=0.5)


@pytest.mark.parametrize("name", ["llama untied", "llama tied"])
def test_under_lora_the_new_rows_learn_and_a_resized_base_takes_them_back(
    from_config, build, tokenizer, tmp_path, name
):
    model = grown(build(from_config(name)), tokenizer)
    adapted = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1, new_ids=new_token_ids(tokenizer, SECTION)))
    rows = {name: each for name, each in adapted.named_parameters() if "trainable_tokens_delta" in name}
    assert {tuple(each.shape) for each in rows.values()} == {(2, 32)}
    assert len(rows) == (2 if "untied" in name else 1)
    ids = torch.tensor([[1, OLDER, 7, OLDER + 1, 2]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    for each in rows.values():
        assert each.grad.any(dim=1).all()
        with torch.no_grad():
            each.add_(torch.ones_like(each))
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    base = build(from_config(name))
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)


def test_a_head_that_is_trained_in_full_needs_no_rows_of_its_own(from_config, build, tokenizer):
    model = grown(build(from_config()), tokenizer)
    lora = LoraSection(rank=2, modules_to_save=("lm_head",))
    adapted = add_adapter(model, lora, AdapterContext(seed=1, new_ids=new_token_ids(tokenizer, SECTION)))
    assert list(adapted.peft_config["default"].trainable_token_indices) == ["model.embed_tokens"]
