"""Preprocessing of text and images into tensors: a tokenizer, an image processor, or a processor for both.

A trained tokenizer is a byte-level BPE (Radford et al., 2019), cached by its texts and vocabulary size. For some model
types (`qwen2`, `qwen3_5`) transformers ignores tokenizer_config.json and builds a class with its own pre-tokenizer and
normalizer, which reads only vocabulary and merges from tokenizer.json: `as_loaded_for` returns the tokenizer that
AutoTokenizer loads from the exported folder.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from finetune.config.sections.data import ImagesSection
from finetune.config.sections.model import ImageProcessorSection, ModelSection, NewTokensSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.hub import is_local_path, loading_errors, resolve_name
from finetune.model.loading.pretrained import load_auto_class, load_named, load_trained_tokenizer, without_warnings
from finetune.registry.tasks import InputKind
from finetune.runtime.files.atomic import build_once, quarantine
from finetune.runtime.files.digests import find_folder_damage, write_folder_digests
from finetune.runtime.upstream import without_hub_retries

NO_CHANGES = ImagesSection()
"""Images get the sizes that the model's own processor has."""


def build_image_processor(section: ImageProcessorSection) -> Any:
    """Return an image processor that resizes to the section's size and normalizes each channel by its values."""
    if len(section.mean) != len(section.std):
        raise ModelError(
            f"model.image_processor: `mean` has the length {len(section.mean)} and `std` {len(section.std)}. "
            "Both need one number per channel."
        )
    with without_warnings():  # about torchvision, which is not needed
        processor_class: Any = transformers.ViTImageProcessor
    return processor_class(
        do_resize=True,
        size={"height": section.size, "width": section.size},
        do_normalize=True,
        image_mean=list(section.mean),
        image_std=list(section.std),
    )


def with_image_size(processor: Any, size: int) -> Any:
    """Return the processor with that output size, resizing and cropping as before."""
    values = processor.to_dict()
    values["size"] = {"height": size, "width": size}
    size_values = dict(processor.size) if isinstance(processor.size, dict) else vars(processor.size)
    if size_values.get("shortest_edge") is not None:
        values["size"] = {"shortest_edge": size}
    if getattr(processor, "do_center_crop", None):
        values["crop_size"] = {"height": size, "width": size}
    return type(processor).from_dict(values)


def with_pixel_limits(processor: Any, images: ImagesSection) -> Any:
    """Return the image processor of a vision-language model with the section's limits; raises ModelError without any.

    Processors of the Qwen2-VL family call the limits of an image's area `shortest_edge` and `longest_edge`.
    """
    keys = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    limits = {key: pixels for key, pixels in keys.items() if pixels is not None}
    if not limits:
        return processor
    arguments = getattr(getattr(type(processor), "valid_kwargs", None), "__annotations__", {})
    if not {"min_pixels", "max_pixels"} <= set(arguments):
        sizes = {key: value for key, value in vars(processor.size).items() if value is not None}
        raise ModelError(
            f"data.images: {type(processor).__name__} has no limits of pixels: it resizes every image to {sizes}. "
            "Remove `min_pixels` and `max_pixels`."
        )
    values = processor.to_dict()
    values["size"] = {key: getattr(processor.size, key) for key in keys} | limits
    if values["size"]["shortest_edge"] > values["size"]["longest_edge"]:
        raise ModelError(
            f"data.images: the limits of the processor become {values['size']['shortest_edge']} to "
            f"{values['size']['longest_edge']} pixels. Write both `min_pixels` and `max_pixels`."
        )
    return type(processor).from_dict(values)


def check_image_shape(config: PreTrainedConfig, processor: Any) -> None:
    """Raise ModelError if the processor's image size or number of channels differs from the model's."""
    mean = getattr(processor, "image_mean", None)
    if not isinstance(mean, list | tuple):
        return
    num_channels, model_channels = len(mean), getattr(config, "num_channels", None)
    if model_channels not in (None, num_channels):
        raise ModelError(
            f"data.images: the model expects {model_channels} channels, but `mean` and `std` of the image processor "
            f"have {num_channels}. Write `num_channels: {num_channels}` in `model.from_config.values`, or one number "
            "per channel in `model.image_processor.mean` and `std`."
        )
    expected = getattr(config, "image_size", None)
    if expected is None or not hasattr(config, "patch_size"):  # models without patches accept any size
        return
    blank = Image.new("L" if num_channels == 1 else "RGB", (64, 64))
    height, width = processor(blank, return_tensors="pt")["pixel_values"].shape[-2:]
    rows, columns = expected if isinstance(expected, list | tuple) else (expected, expected)
    if (height, width) != (rows, columns):
        raise ModelError(
            f"data.images: the model expects images of {rows} x {columns} pixels, but gets {height} x {width}. "
            f"Write `image_size: {height}` in `model.from_config.values`, or `data.images.size: {rows}`."
        )


# fmt: off
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
)
# fmt: on
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Processing:
    """Tokenizer and processor of a model; image tasks have no tokenizer, text tasks no processor."""

    tokenizer: Any = None
    processor: Any = None

    def save(self, folder: Path) -> None:
        """Save both to the folder in transformers' format."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    @property
    def identity(self) -> dict[str, str]:
        """Return a digest of the image preprocessing; empty for text tasks."""
        if self.processor is None:
            return {}
        described = type(self.processor).__name__ + json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        return {"processor": hashlib.blake2b(described.encode(), digest_size=16).hexdigest()}


def load_processing(
    model: ModelSection,
    *,
    reads: InputKind,
    texts: Callable[[], Iterable[str]],
    cache_folder: Path,
    log: Callable[[str], None],
    images: ImagesSection = NO_CHANGES,
) -> Processing:
    """Return the tokenizer and processor for this input type and model, with the image sizes of the section.

    Raises ModelError.
    """
    if reads == "text":
        return Processing(load_tokenizer(model, texts=texts, cache_folder=cache_folder, log=log))
    if reads == "images":
        section = model.image_processor
        if section is not None and section.name is None:
            processor = build_image_processor(section)
        elif section is not None:
            key = "model.image_processor.name"
            processor = load_named(AutoImageProcessor, str(section.name), key=key, section=model)
        elif model.name is not None:
            processor = load_named(
                AutoImageProcessor, model.name, key="model.name", section=model, revision=model.revision
            )
        else:
            raise ModelError(
                "model.image_processor: a model built `from_config` has no image processor. Write `size` or `name`."
            )
        return Processing(processor=processor if images.size is None else with_image_size(processor, images.size))
    name = (model.tokenizer and model.tokenizer.name) or model.name
    if name is None:
        raise ModelError("model.tokenizer: a model built `from_config` has no processor. Write `name`.")
    revision = model.revision if name == model.name else None
    processor = load_named(AutoProcessor, name, key="model.name", section=model, revision=revision)
    if getattr(processor, "tokenizer", None) is None:
        raise ModelError("model.name: its processor has no tokenizer. Use a model for images and text.")
    if hasattr(processor, "image_processor"):
        processor.image_processor = with_pixel_limits(processor.image_processor, images)
    if processor.chat_template:  # older repositories have it only in the processor
        processor.tokenizer.chat_template = processor.chat_template
    ensure_padding(processor.tokenizer, log=log)
    if model.new_tokens is not None:
        add_tokens(processor.tokenizer, model.new_tokens)
    return Processing(processor.tokenizer, processor)


def load_saved_processing(source: str | Path, *, reads: InputKind, key: str, trust_remote_code: bool) -> Processing:
    """Return the tokenizer and processor that `save` wrote to the folder, or the cached ones of a hub name.

    Raises ModelError, which names `key`, if they cannot be loaded.
    """
    auto_class = {"text": AutoTokenizer, "images": AutoImageProcessor, "both": AutoProcessor}[reads]
    with loading_errors(str(source), key=key), without_hub_retries(is_local=True):
        loaded = load_auto_class(auto_class, source, trust_remote_code=trust_remote_code, local_files_only=True)
        if reads == "text":
            return Processing(loaded)
        return Processing(None if reads == "images" else loaded.tokenizer, loaded)


def has_processing(folder: Path, *, reads: InputKind) -> bool:
    """Return whether the folder contains files of a tokenizer or processor, valid or not."""
    names = TOKENIZER_FILES if reads == "text" else PROCESSOR_FILES
    return any((folder / name).is_file() for name in names)


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
    log(f"{'trained' if is_new else 'found'} a tokenizer of {len(tokenizer)} tokens for {num_texts} texts in {folder}")
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
        tokenizer = _load_tokenizer(tokenizer_section.name, key="model.tokenizer.name", model=model)
    elif model.name is not None:
        tokenizer = _load_tokenizer(model.name, key="model.name", model=model, revision=model.revision)
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


def _load_tokenizer(
    name: str, *, key: str, model: ModelSection, revision: str | None = None
) -> PreTrainedTokenizerBase:
    source = resolve_name(name, key=key)
    if is_local_path(name) and not has_processing(Path(source), reads="text"):
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
    text = next((text for text in HOSTILE_TEXTS if _ids(tokenizer, text) != _ids(loaded, text)), None)
    if text is None:
        return tokenizer, None
    both = (one.decode(_ids(one, _PLAIN), skip_special_tokens=True) for one in (tokenizer, loaded))
    original, decoded = (str(text).strip() for text in both)
    if original != decoded:
        raise ModelError(
            f"model.tokenizer: for models of type `{model_type}`, transformers loads every tokenizer as "
            f"{type(loaded).__name__}, which cannot use this vocabulary: it decodes {_PLAIN!r} as {decoded!r}. Use a "
            f"byte-level BPE, such as `model.tokenizer.train`, or another model type."
        )
    return loaded, text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])
