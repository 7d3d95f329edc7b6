"""The special tokens that a tokenizer puts around every text."""

from itertools import takewhile

from transformers import PreTrainedTokenizerBase

_PROBE = "a b"


def frame_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return how many tokens the tokenizer writes before every text and behind it: BERT's are (1, 1), T5's (0, 1)."""
    whole = list(tokenizer(_PROBE, verbose=False)["input_ids"])
    bare = list(tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"])
    special = set(map(int, tokenizer.all_special_ids)) - set(bare)
    before = sum(1 for _ in takewhile(special.__contains__, whole))
    behind = sum(1 for _ in takewhile(special.__contains__, reversed(whole[before:])))
    return before, behind
