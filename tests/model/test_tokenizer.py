import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.config.sections.model import ModelSection, TokenizerSection, TrainTokenizerSection
from finetune.data.encoding.tokenizer import tokenizer_identity
from finetune.errors import ModelError
from finetune.model.tokenizer import load_tokenizer

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


def test_its_special_tokens_are_single_tokens_and_padding_is_not_the_end(trained):
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


def test_the_digest_sees_the_chat_template_and_the_special_tokens_and_not_padding_settings(trained):
    tokenizer = trained()
    digest = digest_of(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert digest_of(tokenizer) == digest
    tokenizer.chat_template = "{{ messages }}"
    with_template = digest_of(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert len({digest, with_template, digest_of(tokenizer)}) == 3


def test_there_must_be_a_text(trained):
    with pytest.raises(ModelError, match="there are no texts"):
        trained([])


def test_the_model_s_folder_brings_its_tokenizer_and_the_end_of_text_pads(load, said, tmp_path):
    word_tokenizer(eos_token="<end>", unk_token="a").save_pretrained(tmp_path / "model")
    tokenizer = load(name=str(tmp_path / "model"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert said == ["the tokenizer has no padding token: <end> is used for padding, which never counts in the loss"]


def test_another_folder_can_be_named(load, said, tmp_path):
    word_tokenizer(eos_token="<end>", pad_token="b").save_pretrained(tmp_path / "other")
    tokenizer = load(name="org/model", tokenizer=TokenizerSection(name=str(tmp_path / "other")))
    assert tokenizer.pad_token == "b"
    assert said == []


def test_a_tokenizer_that_can_neither_pad_nor_end_is_refused(load, tmp_path):
    word_tokenizer(unk_token="a").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="neither a padding nor an end-of-text token"):
        load(name=str(tmp_path / "model"))


def test_a_folder_without_a_tokenizer_is_rejected_with_the_key_to_write(load, tmp_path):
    with pytest.raises(ModelError, match=r"contains no tokenizer .* Write `model\.tokenizer\.name`"):
        load(name=str(tmp_path))


def test_a_model_from_its_config_needs_a_tokenizer(load):
    with pytest.raises(ModelError, match="has no tokenizer"):
        load()
