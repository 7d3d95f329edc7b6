"""Small exported folders of many families, with weights large enough that every part of the model matters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from finetune.data.templates.chat_template import set_chat_template, stop_ids
from tests.small_models import trained_bytes

TEXTS = (
    "The quick brown fox jumps over the lazy dog, 12 times in 2026.",
    "def f(x):\n    return x ** 2  # a function of one variable\n",
    "Ein kurzer Satz mit Ärger; und noch einer, der etwas länger ist.",
    "What is the name of the largest river of this country? It is not known.",
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
_GEMMA = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True}
_GEMMA3_LAYERS = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "mistral": {**SIZES, "sliding_window": None},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 7, "layer_types": _GEMMA3_LAYERS},
    "phi3": {**SIZES, "sliding_window": None},
    "olmo2": SIZES,
    "granite": {**SIZES, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "qwen3_moe": {**SIZES, **_EXPERTS, "head_dim": 16},
}
"""The ten families that no engine is to be reported for."""


def make_tokenizer(*, bos: str | None = "<|begin|>", texts: Sequence[str] = TEXTS) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with ChatML that begins texts with BOS if there is one."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *([bos] if bos else [])]
    backend = trained_bytes([*texts] * 3, special=special, size=400)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.index(bos))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], pad_token=special[3], **({"bos_token": bos} if bos else {})
    )
    made.add_special_tokens({"additional_special_tokens": special[1:3]})
    set_chat_template(made, "chatml")
    if bos:
        made.chat_template = "{{ bos_token }}" + str(made.chat_template)
    return made


def make_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as converted from SentencePiece: each way to merge two pieces to a third is a merge."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = [chr(code) for code in range(33, 127)]
    trained.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    vocabulary = {token: number for number, token in enumerate([*special, *(f"<0x{n:02X}>" for n in range(256))])}
    for piece in pieces:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": special[3:]})
    set_chat_template(made, "chatml")
    made.chat_template = "{{ bos_token }}" + str(made.chat_template)
    return made


def make_model(model_type: str, *, vocabulary_size: int, seed: int = 0, **values: Any) -> Any:
    """Return a model in which biases, norms and scales differ from their initial values."""
    torch.manual_seed(seed)
    own = {"bos_token_id": 4, "eos_token_id": 0, "pad_token_id": 3, "vocab_size": vocabulary_size}
    config = AutoConfig.for_model(model_type, **{**FAMILIES.get(model_type, {}), **own, **values})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write the folder as an export does, with every token that ends an answer."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(stop_ids(tokenizer)), pad_token_id=3
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
