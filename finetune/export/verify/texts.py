"""The tokenizer's results in training, for comparison: ids of texts, rendered conversations, special ids."""

from collections.abc import Callable, Iterable
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
    """Return the tokenizer's ids for these texts and for difficult ones, and the conversations it can render.

    If there are too few texts, they are completed with decoded tokens of the vocabulary. `renders` returns whether the
    template can render a conversation within the limits for untrusted templates.
    """
    rendered = []
    for turns in CONVERSATIONS:
        if tokenizer.chat_template and renders(turns):
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            rendered.append({"turns": turns, "text": text, "arguments": {}})
    names = [f"{token} a{token}b " for token in islice(map(str, tokenizer.all_special_tokens), 10)]
    own = [*HOSTILE_TEXTS, *names, *(str(conversation["text"]) for conversation in rendered)]
    joined = (first + second for first, second in pairwise(reversed(HOSTILE_TEXTS)))
    ids = range(len(tokenizer))
    decoded = (tokenizer.decode(ids[start : start + 8]) for start in ids[:: max(1, len(ids) // NUM_TEXTS)])
    candidates = chain(own, (text[:MAX_CHARACTERS] for text in texts), joined, decoded)
    encoded = []
    for number, text in enumerate(islice(dict.fromkeys(filter(_is_valid, candidates)), NUM_TEXTS)):
        special = number % 2 == 0
        token_ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        encoded.append({"text": text, "special": special, "ids": token_ids})
    return {
        "class": type(tokenizer).__name__,
        "texts": encoded,
        "conversations": rendered,
        "special_ids": {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
