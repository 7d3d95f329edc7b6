"""How the exported model generates: it stops where an answer ends, and pads with its own padding token."""

import copy

from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.data.chat import stop_ids


def generation_config(original: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the model's own settings with the tokenizer's ids: every token that ends an answer ends the generation.

    Settings that contradict one another, which transformers refuses to save, are left out.
    """
    config = copy.deepcopy(original)
    try:
        config.validate(strict=True)
    except ValueError:
        config = GenerationConfig()
    stops = sorted(stop_ids(tokenizer))
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
    config.pad_token_id = tokenizer.pad_token_id
    return config
