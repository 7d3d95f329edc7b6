"""Whether YaRN in a job reaches the frequencies of every causal language model of transformers that can be built small.

    python benchmarks/experiments/rope.py                # about half a minute; prints a table in Markdown
    python benchmarks/experiments/rope.py llama gemma3_text

Each is built from a small config, saved, and read with `model.config: {rope_scaling: ...}`; every buffer of inverse
frequencies is compared with the formula of the paper (Peng et al., 2023). Ends with 1 where one is neither it nor
refused.
"""

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.architectures import ARCHITECTURES
from finetune.config.sections.model import ModelSection
from finetune.errors import FinetuneError
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.config_names import known_names
from finetune.model.loading.dry_run import dry_run_model
from tests.model.loading.test_rope import yarn

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
NOT_BUILT, NO_ROPE, AS_WRITTEN = "not built small here", "no rotary embedding", "the paper's formula"
LARGEST = 30_000_000


def main() -> int:
    """Print what came out, by outcome."""
    logging.disable(logging.WARNING)
    found: dict[str, list[str]] = {}
    for kind in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found.setdefault(_outcome(kind), []).append(kind)
    print("| outcome | number | model types |\n|---|---|---|")
    for outcome, kinds in sorted(found.items(), key=lambda each: -len(each[1])):
        print(f"| {outcome} | {len(kinds)} | {', '.join(kinds)} |")
    return int(any(outcome.startswith("WRONG") for outcome in found))


def _outcome(kind: str) -> str:
    try:
        config = _small(kind)
    except Exception:  # not even its defaults make one
        config = None
    if config is None:
        return NOT_BUILT
    if "rope_parameters" not in known_names(type(config)):
        return NO_ROPE
    nested = [name for name, each in (config.rope_parameters or {}).items() if isinstance(each, dict)]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            dry_run_model(ModelSection(name=folder), head="causal_lm")
        except FinetuneError:  # these sizes give no model, scaled or not
            return NOT_BUILT
        written = {"rope_scaling": dict.fromkeys(nested, YARN) if nested else YARN}
        section = ModelSection(name=folder, config=written)
        try:
            new = load_pretrained_config(section)
            dry_run_model(section, head="causal_lm")
        except FinetuneError as error:
            return f"refused: {str(error).partition(': ')[2].replace(folder, kind)}"
    return _compared(new, nested)


def _small(kind: str) -> Any:
    """Return a small config of that type; None where these sizes make none."""
    known = next((each for each in ARCHITECTURES.values() if each.model_type == kind), None)
    if known is not None:
        return CONFIG_MAPPING[kind](**{**known.config()["values"], "vocab_size": 320, **ENDS})
    usual = CONFIG_MAPPING[kind]()
    usual.allow_global_per_layer_attribute_access = True
    values = {name: value for name, value in {**SIZES, **ENDS}.items() if getattr(usual, name, None) is not None}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or []))
    layers = {"num_hidden_layers": max(2, len(kinds)), "layer_types": (kinds * 2)[: max(2, len(kinds))]}
    of_latent = ("head_dim", "num_key_value_heads") if "qk_rope_head_dim" in values else ()
    for without in (of_latent, ("head_dim",), ("num_key_value_heads",)):
        chosen = {name: value for name, value in values.items() if name not in without}
        for more in (layers if kinds else {}, {}):
            try:
                config = CONFIG_MAPPING[kind](**{**chosen, **more})
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config)
            except Exception:  # other values then
                continue
            if sum(each.numel() for each in model.parameters()) <= LARGEST:
                return config
    return None


def _compared(config: Any, nested: list[str]) -> str:
    try:
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        return f"{NOT_BUILT}: {type(error).__name__}"
    looked = 0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" not in name or "original" in name:
                continue
            layer = next((each for each in nested if name.startswith(each)), None)
            parameters = config.rope_parameters[layer] if layer else config.rope_parameters
            wanted, scale = yarn(parameters, 2 * len(buffer))
            own = getattr(module, name.replace("inv_freq", "attention_scaling"), scale)
            if not torch.allclose(buffer, wanted, rtol=1e-5) or abs(own - scale) > 1e-6:
                return f"WRONG: {name}"
            looked += 1
    return AS_WRITTEN if looked else "WRONG: no frequencies found"


if __name__ == "__main__":
    sys.exit(main())
