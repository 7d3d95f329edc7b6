"""What a tokenizer writes around every text."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.tokenizer import TextTokenizer, num_special_tokens_around

PROCESSORS = {
    (0, 0): None,
    (0, 1): processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)]),
    (1, 1): processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
    (2, 0): processors.TemplateProcessing(single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]),
}


@pytest.mark.parametrize("frame", PROCESSORS)
def test_the_tokens_around_a_text_are_counted(frame):
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[frame] is not None:
        backend.post_processor = PROCESSORS[frame]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert num_special_tokens_around(made) == frame


SAID = ["What is two and two?", "Two and two is four.\n\n", "Hello there!\nHow are you?  Fine, thank you."] * 4
MARKS = ["<|user|>", "<|end|>", "</s>"]


def byte_level(**keys):
    return pre_tokenizers.ByteLevel(**keys), None, pre_tokenizers.ByteLevel.alphabet()


def metaspace(scheme):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme), None, []


KINDS = {
    "byte level": byte_level(add_prefix_space=False),
    "byte level with a space in front": byte_level(add_prefix_space=True),
    "a word mark at the first word": metaspace("first"),
    "a word mark at every word": metaspace("always"),
    "no word mark in front": metaspace("never"),
    "sentencepiece of old": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), []),
    "lower case": (pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(), []),
    "blanks stripped": (
        pre_tokenizers.Whitespace(),
        normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()]),
        [],
    ),
}


def tokenizer_of(kind, marks=MARKS):
    pre_tokenizer, normalizer, alphabet = KINDS[kind]
    backend = Tokenizer(models.BPE(unk_token=None if alphabet else "<unk>"))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    first = [] if alphabet else ["<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*first, *marks], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SAID, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token=None if alphabet else "<unk>")


def conversations(num, *, seed=0):
    """Return texts of marks, words and blanks in every order."""
    draw = random.Random(seed)
    pieces = [*MARKS, " ", "\n", "\n\n", "  ", "Two", " and", "four.", "é你", "<|us", "er|>", "</"]
    return ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(num)]


def agrees(tokenizer, texts):
    """Tell whether every beginning has the number of tokens that encoding it alone and comparing gives."""
    for encoded in TextTokenizer(tokenizer).encode(texts):
        whole = tokenizer(encoded.text, add_special_tokens=False)["input_ids"]
        assert encoded.ids.tolist() == whole
        for end in range(len(encoded.text) + 1):
            alone = tokenizer(encoded.text[:end], add_special_tokens=False)["input_ids"]
            is_beginning = whole[: len(alone)] == alone
            assert encoded.num_tokens_of(end) == (len(alone) if is_beginning else None), (encoded.text, end)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_beginnings_are_counted_as_if_encoded_alone(kind):
    assert agrees(tokenizer_of(kind), conversations(60))


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}])
def test_special_tokens_that_strip_whitespace_do_not_change_incremental_tokenization(flags):
    for kind in ("byte level", "a word mark at the first word", "lower case"):
        marks = [AddedToken(mark, special=True, **flags) for mark in MARKS]
        assert agrees(tokenizer_of(kind, marks), conversations(40))


def test_tokenizers_without_usable_special_tokens_encode_every_prefix():
    assert not TextTokenizer(
        tokenizer_of("lower case", [AddedToken(mark, normalized=True) for mark in MARKS])
    ).cuts_at_seams
    assert agrees(tokenizer_of("byte level", ["</s>"]), conversations(30))


class Polite(PreTrainedTokenizerFast):
    """Adds something in Python, behind the back of the library."""

    def __call__(self, text, **keys):
        return super().__call__(text + "\n\n", **keys)


def test_a_tokenizer_that_adds_something_in_python_is_asked_itself():
    polite = Polite(tokenizer_object=tokenizer_of("byte level").backend_tokenizer, eos_token="</s>")
    tokens = TextTokenizer(polite)
    assert not tokens.is_backend_alone
    assert not tokens.cuts_at_seams
    assert tokens.begun(["Two", ""]) == [polite("Two")["input_ids"], []]
    assert tokens.encode(["Two"])[0].ids.tolist() == polite("Two")["input_ids"]


def test_truncation_that_somebody_else_has_set_cuts_nothing():
    tokenizer = tokenizer_of("byte level")
    tokens = TextTokenizer(tokenizer)
    assert tokens.cuts_at_seams
    whole = tokenizer(SAID[0])["input_ids"]
    tokenizer.pad_token = "</s>"
    tokenizer(SAID, truncation=True, max_length=2, padding="max_length")
    assert tokens.encode([SAID[0]])[0].ids.tolist() == whole
    tokenizer(SAID, truncation=True, max_length=2)
    assert tokens.begun([SAID[0]]) == [whole]
