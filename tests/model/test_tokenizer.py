import copy
import time

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.config.sections.model import (
    LoraSection,
    ModelSection,
    NewTokensSection,
    TokenizerSection,
    TrainTokenizerSection,
)
from finetune.data.encoding.tokenizer import tokenizer_identity
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.build import add_embedding_rows, new_token_ids
from finetune.model.processing import add_tokens, load_tokenizer
from finetune.runtime.parameters import InitContext
from tests.refusals import refused
from tests.small_models import byte_tokenizer

TEXTS = ["the cat sat on the mat while another dog slept", "the dog ate the cat's hat", "naïve café\n\n\t漢字 🙂"]


def digest_of(tokenizer) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(tokenizer_identity(tokenizer).items()))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def trained(tmp_path, said):
    def train(texts=TEXTS, vocabulary_size=300, cache="cache"):
        section = TokenizerSection(train=TrainTokenizerSection(vocabulary_size=vocabulary_size))
        model = ModelSection(tokenizer=section)
        return load_tokenizer(model, texts=lambda: iter(texts), cache_folder=tmp_path / cache, log=said.append)

    return train


@pytest.fixture
def load(tmp_path, said):
    def load(**keys):
        return load_tokenizer(ModelSection(**keys), texts=pytest.fail, cache_folder=tmp_path / "cache", log=said.append)

    return load


def word_tokenizer(**special):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_trained_tokenizer_gives_every_text_back(trained):
    tokenizer = trained()
    for text in [*TEXTS, "never seen: ßøπ <|not special|>"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300


def test_special_tokens_of_a_trained_tokenizer_are_single_tokens_and_padding_is_not_the_end_token(trained):
    tokenizer = trained()
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert tokenizer("<|im_start|>the<|im_end|>")["input_ids"][::2] == [1, 2]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_a_trained_tokenizer_is_cached_by_its_texts(trained, said, tmp_path):
    first, second = trained(), trained()
    assert [sentence.split()[0] for sentence in said] == ["trained", "found"]
    assert len(list((tmp_path / "cache" / "tokenizers").glob("[!.]*"))) == 1
    assert digest_of(first) == digest_of(second)


def test_a_damaged_tokenizer_in_the_cache_is_set_aside_and_trained_again(trained, said, tmp_path):
    digest = digest_of(trained())
    (folder,) = (tmp_path / "cache" / "tokenizers").glob("[!.]*")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"Ġ', '"Ĝ', 1))  # a word that is read as another one
    said.clear()
    assert digest_of(trained()) == digest
    assert "tokenizer.json: not as written" in said[0]
    assert "trained" in said[1]
    assert len(list(folder.parent.glob(".damaged-*"))) == 1
    (folder / "tokenizer_config.json").unlink()
    assert digest_of(trained()) == digest
    assert len(list(folder.parent.glob(".damaged-*"))) == 2


def test_the_same_texts_train_the_same_tokenizer_and_other_texts_a_different_one(trained):
    digest = digest_of(trained())
    assert digest_of(trained(cache="elsewhere")) == digest
    assert digest_of(trained(["other words entirely"] * 3)) != digest
    assert digest_of(trained(vocabulary_size=301)) != digest


def test_training_a_tokenizer_needs_a_text(trained):
    with refused(ModelError):
        trained([])


def test_the_model_s_folder_brings_its_tokenizer_and_the_end_of_text_pads(load, said, tmp_path):
    word_tokenizer(eos_token="<end>", unk_token="a").save_pretrained(tmp_path / "model")
    tokenizer = load(name=str(tmp_path / "model"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert said == ["the tokenizer has no padding token: <end> is used for padding, which never counts in the loss"]


def test_a_tokenizer_with_padding_of_its_own_keeps_it(load, said, tmp_path):
    word_tokenizer(eos_token="<end>", pad_token="b").save_pretrained(tmp_path / "other")
    tokenizer = load(name="org/model", tokenizer=TokenizerSection(name=str(tmp_path / "other")))
    assert tokenizer.pad_token == "b"
    assert said == []


def test_a_tokenizer_without_padding_and_end_tokens_is_rejected(load, tmp_path):
    word_tokenizer(unk_token="a").save_pretrained(tmp_path / "model")
    with refused(ModelError, "model.tokenizer: "):
        load(name=str(tmp_path / "model"))


def test_a_folder_without_a_tokenizer_is_rejected_with_the_key_to_write(load, tmp_path):
    with refused(ModelError, "`model.tokenizer.name`"):
        load(name=str(tmp_path))


def test_a_model_from_its_config_needs_a_tokenizer(load):
    with refused(ModelError):
        load()


SECTION = NewTokensSection(tokens=("quokka",), special=("<|tool|>",))
OLDER = 300  # rows of the model, more than the tokenizer has tokens


@pytest.fixture(scope="module")
def plain_tokenizer():
    made = byte_tokenizer([f"{a}{b} tool quo" for a in "abcdefgh" for b in "abcdefgh"], size=OLDER)
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
    with refused(ModelError, "`quokka`"):
        new_token_ids(plain_tokenizer, SECTION)


@pytest.mark.parametrize(
    "keys",
    [{"tokens": ("tool",)}, {"special": ("<|endoftext|>",)}, {"tokens": ("quokka", "quokka")}, {"tokens": ("  ",)}],
)
def test_an_invalid_new_token_is_rejected_by_name(plain_tokenizer, keys):
    with refused(ModelError, "model.new_tokens"):
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


def test_new_rows_start_from_their_subwords_or_from_the_seed_and_the_token(
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
def test_new_rows_are_trained_under_lora_and_fit_a_resized_base(from_config, build, tokenizer, tmp_path, name):
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


def test_a_word_of_any_length_trains_a_tokenizer_in_linear_time(trained):
    started = time.process_time()
    trained(["red green blue " + "ab" * 200_000 + " end", " " * 400_000 + "x"])
    assert time.process_time() - started < 30
