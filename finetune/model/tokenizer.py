"""The tokenizer: the model's own, another one by name, or one trained on the run's texts.

A trained one is a byte-level BPE (Radford et al., 2019), cached by its texts and vocabulary size. New tokens get ids,
embedding rows and initial values before training. For some model types (`qwen2`, `qwen3_5`) transformers ignores
tokenizer_config.json and builds a class with its own pre-tokenizer and normalizer, which reads only vocabulary and
merges from tokenizer.json: `as_loaded_for` returns the tokenizer that AutoTokenizer loads from the exported folder.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.config.sections.model import ModelSection, NewTokensSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.hub import is_local_path, resolve_name
from finetune.model.loading.pretrained import load_auto_class, load_named, load_trained_tokenizer, without_warnings
from finetune.runtime.files.atomic import build_once, quarantine
from finetune.runtime.files.digests import find_folder_damage, write_folder_digests
from finetune.runtime.parameters import InitContext
from finetune.runtime.seeds import derive_seed

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PADDING = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PADDING)
RECIPE_VERSION = "1"
"""Part of the cache key, to be increased when the same texts would result in another tokenizer."""
_FORMAT_VERSION = 2
"""Of the folder, to be increased when the same tokenizer is written differently."""


def train_or_load_tokenizer(
    texts: Callable[[], Iterable[str]], *, vocabulary_size: int, cache_folder: Path, log: Callable[[str], None]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer trained on these texts, or the cached one; it has ChatML's tokens but no chat template."""
    digest = hashlib.blake2b(f"{RECIPE_VERSION}/{vocabulary_size}".encode(), digest_size=16)
    num_texts = 0
    for text in texts():
        encoded = text.encode("utf-8", errors="replace")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
        num_texts += 1
    if num_texts == 0:
        raise ModelError("model.tokenizer.train: there are no texts to train the tokenizer on.")
    folder = cache_folder / "tokenizers" / f"{digest.hexdigest()}-{_FORMAT_VERSION}"
    train = partial(_train, texts, vocabulary_size=vocabulary_size)
    is_new = build_once(folder, train, log=log)
    if (damage := find_folder_damage(folder)) is not None:  # it is moved aside, and trained again
        try:
            aside = quarantine(folder, lambda: find_folder_damage(folder) is not None, log=log)
            if aside is not None:
                log(f"warning: the trained tokenizer {folder} is damaged: {damage}. It was renamed to {aside.name}.")
            is_new = build_once(folder, train, log=log)
            again = find_folder_damage(folder)
        except OSError as error:
            raise ModelError(
                f"the trained tokenizer {folder} is damaged ({damage}) and cannot be created again: {error}. "
                "Set data.cache_folder to a writable folder."
            ) from error
        if again is not None:
            raise ModelError(f"{folder}: {again}, and its replacement is damaged, too. Check the disk of this machine.")
    tokenizer = load_trained_tokenizer(folder)
    verb = "trained" if is_new else "found"
    log(f"{verb} a tokenizer of {len(tokenizer)} tokens for {num_texts} texts in {folder}")
    return tokenizer


_LONG_WORD = re.compile(r"(\S{10000})\S+|(?<=\s{10000})\s+")
"""A word, or a run of blanks, that is longer than any that counts in the training of a tokenizer."""


def _train(texts: Callable[[], Iterable[str]], folder: Path, *, vocabulary_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # A row with a lone surrogate is refused by name when it is encoded; it must not fail here without its location.
    # Merging is quadratic in the length of a word, from whose rest no token of use could come.
    valid = (text.encode("utf-8", errors="replace").decode() for text in texts())
    tokenizer.train_from_iterator((_LONG_WORD.sub(r"\1", text) for text in valid), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    write_folder_digests(folder)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load_tokenizer(
    model: ModelSection,
    *,
    texts: Callable[[], Iterable[str]],
    cache_folder: Path,
    log: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a padding token and the job's new tokens.

    `texts` is called only when the tokenizer has to be trained; the result is cached under `cache_folder`. Raises
    ModelError.
    """
    tokenizer_section = model.tokenizer
    if tokenizer_section is not None and tokenizer_section.train is not None:
        vocabulary_size = tokenizer_section.train.vocabulary_size
        tokenizer = train_or_load_tokenizer(texts, vocabulary_size=vocabulary_size, cache_folder=cache_folder, log=log)
    elif tokenizer_section is not None and tokenizer_section.name is not None:
        tokenizer = _load_pretrained(tokenizer_section.name, key="model.tokenizer.name", model=model, revision=None)
    elif model.name is not None:
        tokenizer = _load_pretrained(model.name, key="model.name", model=model, revision=model.revision)
    else:
        raise ModelError("model.tokenizer: a model built `from_config` has no tokenizer. Write `train` or `name`.")
    if tokenizer_section is not None:
        tokenizer = _as_exported(tokenizer, model, log=log)
    ensure_padding(tokenizer, log=log)
    if model.new_tokens is not None:
        add_tokens(tokenizer, model.new_tokens)
    return tokenizer


def _as_exported(
    tokenizer: PreTrainedTokenizerBase, model: ModelSection, *, log: Callable[[str], None]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that AutoTokenizer will load from the exported folder, so that training uses the same."""
    try:
        config: Any = model.from_config or (None if model.name is None else load_pretrained_config(model))
    except ModelError:
        config = None  # the error is reported when the model is loaded
    if config is None:
        return tokenizer
    model_type = str(config.model_type)
    loaded, text = as_loaded_for(tokenizer, model_type=model_type, trust_remote_code=model.trust_remote_code)
    if text is not None:
        log(
            f"the tokenizer is used as {type(loaded).__name__}, which transformers loads for models of type "
            f"`{model_type}`: texts such as {text!r} have other tokens than with {type(tokenizer).__name__}"
        )
    return loaded


def ensure_padding(tokenizer: PreTrainedTokenizerBase, *, log: Callable[[str], None]) -> None:
    """Use the end-of-sequence token for padding if there is no padding token; raises ModelError without either."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ModelError(
            "model.tokenizer: the tokenizer has neither a padding nor an end-of-text token. Add one: "
            "`tokenizer.add_special_tokens({'eos_token': ...})`, then `save_pretrained`, then name its folder."
        )
    tokenizer.pad_token = tokenizer.eos_token
    log(
        f"the tokenizer has no padding token: {tokenizer.eos_token} is used for padding, which never counts in the loss"
    )


def _load_pretrained(name: str, *, key: str, model: ModelSection, revision: str | None) -> PreTrainedTokenizerBase:
    source = resolve_name(name, key=key)
    if is_local_path(name) and not any((Path(source) / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(
            f"{key}: the folder {source} contains no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Write `model.tokenizer.name` (a hub name or a folder with one) or `model.tokenizer.train`."
        )
    tokenizer: PreTrainedTokenizerBase = load_named(AutoTokenizer, name, key=key, section=model, revision=revision)
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, section: NewTokensSection) -> None:
    """Add the tokens; raises ModelError for one that is already in the vocabulary, or is listed twice."""
    vocabulary = tokenizer.get_vocab()
    written = [*section.tokens, *section.special]
    for key, tokens in (("tokens", section.tokens), ("special", section.special)):
        for token in tokens:
            if token in vocabulary:
                raise ModelError(f"model.new_tokens.{key}: `{token}` is already in the vocabulary. Remove it.")
            if written.count(token) > 1:
                raise ModelError(f"model.new_tokens.{key}: `{token}` is listed twice. List it once.")
            if not token.strip():
                raise ModelError(f"model.new_tokens.{key}: a token of whitespace only cannot be matched in text.")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in section.tokens])
    special = [AddedToken(token, special=True, normalized=False) for token in section.special]
    tokenizer.add_tokens(special, special_tokens=True)


def new_token_ids(tokenizer: PreTrainedTokenizerBase, section: NewTokensSection) -> tuple[int, ...]:
    """Return the ids of the new tokens in a tokenizer that has them."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in (*section.tokens, *section.special) if token not in vocabulary]
    if missing:
        raise ModelError(f"model.new_tokens: the run's tokenizer does not have `{missing[0]}`.")
    return tuple(vocabulary[token] for token in (*section.tokens, *section.special))


def add_embedding_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: NewTokensSection,
    *,
    seed: int,
    init_context: InitContext,
) -> None:
    """Resize embeddings and head to the tokenizer, and initialize the rows of the new tokens.

    The rows depend only on the seed, the token and the existing rows, and are computed in float32. Tied weights stay
    tied; a head's bias starts at zero. A rank that builds on the meta device is only resized. Collective under ZeRO-3.
    """
    ids = new_token_ids(tokenizer, section)
    if model.config.get_text_config().vocab_size < len(tokenizer):
        with torch.random.fork_rng(devices=()):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if init_context.on_meta_device:
        return
    texts = (*section.tokens, *section.special)
    num_existing = min(ids)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(layer.weight): layer.weight for layer in layers if layer is not None}  # tied ones once
    for weight in weights.values():
        with torch.no_grad(), init_context.gather([weight]):
            existing = weight[:num_existing].float()  # [tokens, width]
            rows = []
            for text in texts:
                pieces = list(_subword_ids(tokenizer, text, below=num_existing)) if section.init == "pieces" else []
                if section.init == "random":  # normal, with the standard deviation of the existing rows
                    generator = torch.Generator().manual_seed(derive_seed(seed, "new tokens", text))
                    row = torch.randn(existing.shape[1], generator=generator).to(existing) * existing.std()
                else:
                    row = existing[pieces].mean(dim=0) if pieces else existing.mean(dim=0)
                rows.append(row)
            weight[list(ids)] = torch.stack(rows).to(weight)


def _subword_ids(tokenizer: Any, text: str, *, below: int) -> Sequence[int]:
    """Return the ids into which the tokenizer splits the text without the new token."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        pieces = tokenizer.convert_tokens_to_ids(tokenizer._tokenize(text))
    else:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        split = backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer is not None else [(normal, ())]
        pieces = [token.id for word, _ in split for token in backend.model.tokenize(word)]
    return [piece for piece in pieces if piece is not None and piece < below]


# fmt: off
HOSTILE_TEXTS = (
    "", " ", "  ", "   \t ", "\n", "\n\n\n", "\r\n", "\t\tx", "a b", " a", "a ", "a  b", "a\n\nb", " \n a", "0",
    "7 8", "123456789", "1,234.56", "2026-11-23T00:13", "3.14159e-10", "0x7f", "x1y22z333", "\u0661\u0662\u0663",
    "\u00bd \u2153", "don't", "I'LL we'Ve", "'s", "HELLO World hElLo", "snake_case camelCase", "e-mail@x.org",
    "https://a.b/c?d=e#f", "na\u00efve caf\u00e9", "cafe\u0301", "\ufb01ne \ufb03", "Stra\u00dfe \u1e9e",
    "\u0130stanbul \u0131", "\u4f60\u597d\uff0c\u4e16\u754c", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4", "\u05e2\u05d1\u05e8\u05d9\u05ea", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f44d\U0001f3fd", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7",
    "\u200b\u200d\ufeff", "\u00a0x\u2003y", "a\u0000b", "\u202eabc", "\u00bd\u338f\u2460", "\U00012000",
    "def f(x):\n    return x ** 2  # y\n", "\n\n\n  if (a!=b){c+=1;}", "...!?--==>>", "((([[[{{{", "-----",
    "\\n\\t", "<|endoftext|>", "<|im_start|>user", "<s></s>", "[CLS] [SEP] [MASK]", "<|im_end|>\n", "<pad><unk>",
    "<0x0A>", "x" * 300, "ab " * 100, "The quick brown fox jumps over the lazy dog.",
    "\u00a1\u00bf\u00ab\u00bb\u201e\u201c\u201d\u2018\u2019\u2026\u2014\u2013",
)
# fmt: on
"""Texts on which pre-tokenizers, normalizers and tables of special tokens differ."""

_PLAIN = "The quick brown fox jumps over the lazy dog."


def as_loaded_for(
    tokenizer: PreTrainedTokenizerBase, *, model_type: str, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Return the tokenizer that AutoTokenizer loads for this model type, and a text that it encodes differently.

    If it encodes all texts identically, the given tokenizer and None are returned. Raises ModelError if the loaded one
    cannot use this vocabulary, so that a plain text would not survive encoding and decoding.
    """
    with TemporaryDirectory() as name, without_warnings():
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        loaded = load_auto_class(AutoTokenizer, folder, trust_remote_code=trust_remote_code, local_files_only=True)
    text = differing_text(tokenizer, loaded)
    if text is None:
        return tokenizer, None
    original, decoded = (
        str(one.decode(_ids(one, _PLAIN), skip_special_tokens=True)).strip() for one in (tokenizer, loaded)
    )
    if original != decoded:
        raise ModelError(
            f"model.tokenizer: for models of type `{model_type}`, transformers loads every tokenizer as "
            f"{type(loaded).__name__}, which cannot use this vocabulary: it decodes {_PLAIN!r} as {decoded!r}. Use a "
            f"byte-level BPE, such as `model.tokenizer.train`, or another model type."
        )
    return loaded, text


def differing_text(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Return the first text that the two tokenizers encode differently; None if there is none."""
    return next((text for text in HOSTILE_TEXTS if _ids(one, text) != _ids(other, text)), None)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])
