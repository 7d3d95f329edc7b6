"""The files of sentence-transformers for an exported model: modules, pooling, prompts, maximum length.

They have the format of version 2, which all versions up to 6 read.
"""

from collections.abc import Mapping
from typing import Any

from finetune.config.sections.task import EmbeddingSection, RerankingSection
from finetune.registry.losses import RERANKING_LOSSES

_POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}
_OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")


def embedding_files(section: EmbeddingSection, *, dimension: int, max_length: int) -> dict[str, Any]:
    """Return the files of an embedding model by relative path."""
    modes = {name: mode == section.pooling for mode, name in _POOLING_MODES.items()}
    pooling = {"word_embedding_dimension": dimension, **modes, **dict.fromkeys(_OTHER_MODES, False)}
    names = ["Transformer", "Pooling", *(["Normalize"] if section.normalize else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{name}" if number else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]
    passage = section.prompts.passage
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {**pooling, "include_prompt": True},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": section.prompts.query, "document": passage, "passage": passage},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if section.normalize else "dot",
        },
    }


def activation_of(section: RerankingSection) -> str:
    """Return the activation of `CrossEncoder`: a sigmoid if the score is a logit, else the identity."""
    is_logit = RERANKING_LOSSES[section.loss].is_logit
    return f"torch.nn.modules.{'activation.Sigmoid' if is_logit else 'linear.Identity'}"


def reranking_files(section: RerankingSection, *, max_length: int) -> Mapping[str, Any]:
    """Return the files of a cross-encoder by relative path; versions before 6 only read the model's config."""
    text = {"text": {"method": "forward", "method_output_name": "logits"}}
    return {
        "modules.json": [
            {
                "idx": 0,
                "name": "0",
                "path": "",
                "type": "sentence_transformers.base.modules.transformer.Transformer",
            }
        ],
        "sentence_bert_config.json": {
            "transformer_task": "sequence-classification",
            "modality_config": text,
            "module_output_name": "scores",
            "max_seq_length": max_length,
        },
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": activation_of(section),
            "prompts": {},
            "default_prompt_name": None,
        },
    }
