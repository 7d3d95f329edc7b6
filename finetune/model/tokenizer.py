"""The tokenizer: the model's own, another one by name, or one trained on the run's own texts."""

from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.byte_pairs import trained_tokenizer
from finetune.model.hub import is_folder, located, told
from finetune.model.new_tokens import add_tokens
from finetune.model.pretrained import load_settings
from finetune.runtime.hub import is_offline, without_vain_retries

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
    say: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a padding token and the job's new tokens.

    `texts` is called only when the tokenizer is to be trained; the result is kept under `cache_folder`, made once for
    the same texts. Raises ModelError.
    """
    asked = model.tokenizer
    if asked is not None and asked.train is not None:
        vocabulary_size = asked.train.vocabulary_size
        tokenizer = trained_tokenizer(texts, vocabulary_size=vocabulary_size, cache_folder=cache_folder, say=say)
    elif asked is not None and asked.name is not None:
        tokenizer = _pretrained(asked.name, key="model.tokenizer.name", model=model, revision=None)
    elif model.name is not None:
        tokenizer = _pretrained(model.name, key="model.name", model=model, revision=model.revision)
    else:
        raise ModelError("model.tokenizer: a model built `from_config` brings no tokenizer. Write `train` or `name`.")
    ensure_padding(tokenizer, say=say)
    if model.new_tokens is not None:
        add_tokens(tokenizer, model.new_tokens)
    return tokenizer


def ensure_padding(tokenizer: PreTrainedTokenizerBase, *, say: Callable[[str], None]) -> None:
    """Have the tokenizer pad with end-of-sequence where it has no padding; raises ModelError where it has neither."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ModelError(
            "model.tokenizer: the tokenizer has neither a padding nor an end-of-text token. Save one that has: "
            "`tokenizer.add_special_tokens({'eos_token': ...})`, then `save_pretrained`, then name its folder."
        )
    tokenizer.pad_token = tokenizer.eos_token
    say(f"the tokenizer has no padding token: {tokenizer.eos_token} pads too; padding never counts in the loss")


def _pretrained(name: str, *, key: str, model: ModelSection, revision: str | None) -> PreTrainedTokenizerBase:
    place = located(name, key=key)
    if is_folder(name) and not any((Path(place) / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(
            f"{key}: the folder {place} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Write `model.tokenizer.name` (a hub name or a folder with one) or `model.tokenizer.train`."
        )
    with told(name, key=key), without_vain_retries(is_local=is_folder(name)):
        return load_settings(
            AutoTokenizer,
            place,
            revision=revision,
            cache_dir=model.cache_folder,
            trust_remote_code=model.trust_remote_code,
            local_files_only=is_folder(name) or is_offline(),
        )
