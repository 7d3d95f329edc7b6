"""How sequences begin and end."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from finetune.errors import DataError


def begins_twice(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the beginning-of-sequence stands at the beginning twice."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token; raises DataError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so the model could not learn where to stop.")
    return int(tokenizer.eos_token_id)
