"""Tokens per second of CPU without padding against padded batches, for decoders that are not plain attention.

    python benchmarks/experiments/hybrid_decoders.py [--rounds 9] [--kinds qwen3_next gpt_oss ...]

Samples have lognormal lengths (median 200, sigma 0.9, cut at 512), 8 a microbatch. A round trains every competitor on
the same microbatch, in an order that is shuffled each time: padded, with the attention that transformers chooses, which
is what this package did before; and without padding. Also the largest difference of a sample's logits in a row from the
sample alone, relative to the largest logit.
"""

import argparse
import random
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.model.attention.implementation import default_attention
from finetune.task.lm_loss.token_loss import cross_entropy_sum
from finetune.task.model_inputs import collate_padded, collate_padding_free, forward_logits

VOCABULARY_SIZE, LONGEST, MICROBATCH = 2048, 512, 8
COMMON = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 256, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA_RULE = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "layer_types": ["linear_attention", "full_attention"],
}
STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_expand": 2, "mamba_n_groups": 1}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **ATTENTION,
        **{"num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32},
        **{"qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, **EXPERTS},
    },
    "falcon_h1": {**ATTENTION, **STATE_SPACE, "mamba_d_ssm": 512, "head_dim": 32},
    "gpt_oss": {**ATTENTION, "head_dim": 32, "num_local_experts": 8, **EXPERTS, "sliding_window": 128},
    "granitemoehybrid": {
        **{**ATTENTION, **STATE_SPACE, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
        "shared_intermediate_size": 704,
    },
    "lfm2": {**ATTENTION, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 32, "n_groups": 1, "expand": 2},
    "qwen3_5_text": {**ATTENTION, **DELTA_RULE, "head_dim": 32},
    "qwen3_next": {**ATTENTION, **DELTA_RULE, "head_dim": 32, "num_experts": 8, **EXPERTS},
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    table = Table("architecture", "without padding, against padded", "quartiles", "difference from a sample alone")
    for kind in options.kinds:
        config = AutoConfig.for_model(kind, **COMMON, **KINDS[kind], bos_token_id=0, eos_token_id=0, pad_token_id=0)
        ratios = sorted(_ratios(config, options.rounds))
        quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        table.add_row(kind, f"{median(ratios):.2f}", quartiles, f"{_isolation_error(config):.0e}")
    Console().print(table)


def _model(config: Any, attention: str | None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _ratios(config: Any, rounds: int) -> list[float]:
    """Return the speed without padding over that of padded batches, round by round; one round warms up."""
    models = {"padded": _model(config, None).train(), "free": _model(config, default_attention(config)).train()}
    draw, lengths, found = random.Random(0), np.random.default_rng(0), []
    for number in range(rounds + 1):
        drawn = np.clip(lengths.lognormal(np.log(200), 0.9, MICROBATCH), 2, LONGEST).astype(int)
        samples = [_sample(number * MICROBATCH + place, length) for place, length in enumerate(drawn.tolist())]
        batches = {"padded": collate_padded(samples, pad_id=0), "free": collate_padding_free(samples)}
        seconds = {}
        for name in draw.sample(list(models), 2):
            seconds[name] = _seconds(models[name], batches[name])
        found.append(seconds["padded"] / seconds["free"])
    return found[1:]


def _sample(index: int, length: int) -> Features:
    ids = np.random.default_rng(index).integers(0, VOCABULARY_SIZE, length).astype(np.uint32)
    return Features({"input_ids": ids, "is_target": np.ones(length, bool)}, index)


def _seconds(model: Any, batch: Batch) -> float:
    started = time.process_time()
    cross_entropy_sum(forward_logits(model, batch), batch.labels).backward()
    model.zero_grad()
    return time.process_time() - started


@torch.no_grad()
def _isolation_error(config: Any) -> float:
    samples = [_sample(place, length) for place, length in enumerate((300, 1, 170, 2, 64, 7))]
    model = _model(config, default_attention(config)).eval()
    row = forward_logits(model, collate_padding_free(samples))[0]
    alone = torch.cat([forward_logits(model, collate_padded([each], pad_id=0))[0] for each in samples])
    return ((row - alone).abs().max() / alone.abs().max()).item()


if __name__ == "__main__":
    main()
