"""End-of-sequence at the end of every text, for models whose vector is read there."""

from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.tokenizer import require_eos_id
from finetune.data.upstream import fast_backend
from finetune.errors import DataError


def append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the tokenizer end every text with end-of-sequence, and write so into its files, unless it does already.

    Raises DataError for a tokenizer without such a token, or one that cannot be changed.
    """
    eos = require_eos_id(tokenizer)
    if ends_with_eos(tokenizer):
        return
    backend, settings = fast_backend(tokenizer), tokenizer.init_kwargs
    if "add_bos_token" in settings or "add_eos_token" in settings:  # then loading builds the post-processor anew
        settings["add_eos_token"] = True
        tokenizer.add_eos_token = True
    elif backend is not None:
        name = str(tokenizer.eos_token)
        last = processors.TemplateProcessing(
            single=f"$A:0 {name}:0", pair=f"$A:0 $B:1 {name}:1", special_tokens=[(name, eos)]
        )
        before = backend.post_processor
        backend.post_processor = last if before is None else processors.Sequence([before, last])
    if not ends_with_eos(tokenizer):
        raise DataError(
            f"task.embedding.pooling: `last_token` reads the end-of-sequence token, and this tokenizer "
            f"({type(tokenizer).__name__}) cannot be made to write it. Use one with a tokenizer.json, or `mean`."
        )


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the tokenizer ends every text with end-of-sequence."""
    ids = list(tokenizer("a b", verbose=False)["input_ids"])
    return bool(ids) and ids[-1] == tokenizer.eos_token_id
