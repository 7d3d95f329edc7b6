import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.errors import ModelError
from finetune.export.gguf import tokenizer as gguf_tokenizer
from finetune.export.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, convert_tokenizer
from tests.serving_folders import make_sentencepiece_tokenizer, make_tokenizer

LLAMA3 = gguf_tokenizer._LLAMA3


def with_pre_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    made = make_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return made


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def converted(tokenizer: PreTrainedTokenizerFast, *, vocabulary_size: int = 402):
    return convert_tokenizer(tokenizer, stop_ids={0, 2}, vocabulary_size=vocabulary_size)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (split_by(LLAMA3), "dbrx"),
        (split_by(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), "qwen2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            "smollm",
        ),
    ],
)
def test_a_known_pre_tokenizer_has_llama_cpps_name(pre_tokenizer, name):
    assert converted(with_pre_tokenizer(pre_tokenizer)).pre == name


def test_whole_words_that_skip_the_merges_are_llama_3s():
    made = with_pre_tokenizer(split_by(LLAMA3))
    content = json.loads(made.backend_tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    made._tokenizer = Tokenizer.from_str(json.dumps(content))
    assert converted(made).pre == "llama-bpe"


@pytest.mark.parametrize("pre_tokenizer", [split_by(r"\d+"), pre_tokenizers.Whitespace()])
def test_an_unknown_pre_tokenizer_is_refused(pre_tokenizer):
    with pytest.raises(ModelError, match="no equivalent of this pre-tokenizer"):
        converted(with_pre_tokenizer(pre_tokenizer))


def test_embeddings_without_a_token_are_unused():
    made = converted(make_tokenizer(), vocabulary_size=410)
    assert made.types[-1] == UNUSED
    assert made.tokens[-1] == "[PAD409]"
    assert (made.types[0], made.types[4], made.types[6]) == (CONTROL, CONTROL, NORMAL)


def test_pieces_of_sentencepiece_have_scores_in_the_order_of_their_merges():
    tokenizer = make_sentencepiece_tokenizer()
    made = converted(tokenizer, vocabulary_size=len(tokenizer))
    assert (made.model, made.merges, made.flags["add_space_prefix"]) == ("llama", (), True)
    assert made.types[made.tokens.index("<0x0A>")] == BYTE
    assert made.types[made.tokens.index("<unk>")] == UNKNOWN
    score = dict(zip(made.tokens, made.scores, strict=True))
    merges = [tuple(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    first, last = "".join(merges[0]), "".join(merges[-1])
    assert score[first] > score[last] > score["<unk>"]


def test_pieces_without_all_of_their_merges_are_refused():
    """llama.cpp would merge `a` and `bc`, this tokenizer only `ab` and `c`."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc"])}
    model = models.BPE(
        vocab=vocabulary, merges=[("a", "b"), ("b", "c"), ("ab", "c")], byte_fallback=True, unk_token="<unk>"
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.ByteFallback()
    with pytest.raises(ModelError, match=r"without all of their merges \(a \+ bc\)"):
        converted(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), vocabulary_size=7)


def test_a_word_piece_tokenizer_is_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="a tokenizer of the type WordPiece"):
        converted(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_more_ends_than_llama_cpp_has_keys_for_are_refused():
    with pytest.raises(ModelError, match="4 tokens that end an answer"):
        convert_tokenizer(make_tokenizer(), stop_ids={0, 2, 5, 6}, vocabulary_size=402)
