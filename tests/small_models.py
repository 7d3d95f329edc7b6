"""Sizes of models that are built in a moment, and tokenizers of bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def byte_tokenizer(
    texts: Iterable[str] = (), *, special: Sequence[str] = ("<|endoftext|>",), size: int = 400, **named: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these special tokens and all bytes, with the merges that texts train up to its size.

    EOS is the first special token, unless it is named.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=trained_bytes(texts, special=special, size=size), **{"eos_token": special[0], **named}
    )


def trained_bytes(texts: Iterable[str], *, special: Sequence[str], size: int) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend
