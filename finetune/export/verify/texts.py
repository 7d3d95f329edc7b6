"""What the training's tokenizer makes of texts: ids, rendered conversations, special ids."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.model.loading.tokenizer_class import HOSTILE_TEXTS

NUM_TEXTS = 200
MAX_CHARACTERS = 2_000

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 12 x 12?"}, {"role": "assistant", "content": "144."}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " Name\ta color "},
        {"role": "assistant", "content": "Blue"},
    ],
    [
        {"role": "user", "content": "héllo"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ],
)


def expected_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, renders: Callable[[list[dict[str, str]]], bool]
) -> dict[str, Any]:
    """Return what the tokenizer makes of these texts, of hostile ones, and of conversations that its template takes.

    Where the texts are too few, tokens of the vocabulary in a row make up the number. `renders` tells whether the
    template takes a conversation, within the bounds that hold for templates of others.
    """
    rendered = []
    for turns in CONVERSATIONS:
        if tokenizer.chat_template and renders(turns):
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            rendered.append({"turns": turns, "text": text, "arguments": {}})
    names = [f"{token} a{token}b " for token in islice(map(str, tokenizer.all_special_tokens), 10)]
    own = [*HOSTILE_TEXTS, *names, *(str(each["text"]) for each in rendered)]
    joined = (one + other for one, other in pairwise(reversed(HOSTILE_TEXTS)))
    ids = range(len(tokenizer))
    decoded = (tokenizer.decode(ids[start : start + 8]) for start in ids[:: max(1, len(ids) // NUM_TEXTS)])
    candidates = chain(own, (text[:MAX_CHARACTERS] for text in texts), joined, decoded)
    listed = list(islice(dict.fromkeys(text for text in candidates if _is_valid(text)), NUM_TEXTS))
    return {
        "class": type(tokenizer).__name__,
        "texts": [_encoded(tokenizer, text, special=place % 2 == 0) for place, text in enumerate(listed)],
        "conversations": rendered,
        "special_ids": {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> Mapping[str, Any]:
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    return {"text": text, "special": special, "ids": ids}


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
