"""Full fine-tuning of mixtures of experts with the balance loss: the same numbers under every strategy and cut.

    python -m benchmarks.experiments.experts_parity [--models mixtral,qwen3_moe] [--ranks 2,4] [--steps 4]

A model of two or three layers is trained on the same global batches by one process, and under DDP, FSDP2, ZeRO-2 and
ZeRO-3 on several gloo processes with accumulation 1 and 4. Prints by how much losses, balance losses and exported
weights differ from those of one process; exits with 1 where one does by more than 1e-4. Ranks are forks of one server
(`tests/launching.py`), which saves their imports.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from finetune.report.history import read_events
from tests import launching

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
ACCUMULATIONS = (1, 4)
GLOBAL_BATCH = 48
TOLERANCE = 1e-4
WORDS = ("red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown")

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_FINE = {**_SIZES, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "qk_nope_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "head_dim": 8},
}
_LOCAL = {**_SIZES, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": {**_FINE, "num_hidden_layers": 3, "num_experts": 8, "mlp_only_layers": [1]},
    "deepseek_v3": {**_FINE, **_LATENT, **_GROUPED},
    "granitemoehybrid": {**_LOCAL, **_MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "glm4_moe": {**_FINE, **_GROUPED},
    "gpt_oss": {**_LOCAL, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "granitemoe": _LOCAL,
    "lfm2_moe": {**_FINE, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "olmoe": {**_SIZES, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {**_SIZES, **_LINEAR, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {**_FINE, **_LINEAR, "num_experts": 8},
}
"""Routers with a softmax and with a sigmoid (DeepSeek-V3, GLM-4, LFM2), layers without experts, hybrids."""

LORA = "model.lora={rank: 4, target_modules: [q_proj, k_proj, v_proj, o_proj]}"


@dataclass(frozen=True)
class Result:
    """What a run has logged and exported."""

    losses: tuple[float, ...]
    balance_losses: tuple[float, ...]
    weights: Mapping[str, Any]

    def differences(self, wanted: "Result") -> tuple[float, float, float]:
        """Return the largest of the losses and balance losses, relative, and of the weights, absolute."""
        assert self.weights.keys() == wanted.weights.keys()
        weights = [float((self.weights[name] - each).abs().max()) for name, each in wanted.weights.items()]
        return (*(_relative(*pair) for pair in self._logged(wanted)), max(weights))  # type: ignore[return-value]  # two

    def _logged(self, wanted: "Result") -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
        yield self.losses, wanted.losses
        yield self.balance_losses, wanted.balance_losses


def main() -> int:
    """Print the table and return 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*MODELS, "mixtral-lora"]))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    table = Table("model", "strategy", "ranks", "accumulation", "loss", "balance loss", "weights", title="differences")
    largest = 0.0
    with tempfile.TemporaryDirectory(prefix="experts-parity-") as scratch:
        os.environ |= {launching.ADDRESS: str(Path(scratch, "warm")), launching.OWNER: str(os.getpid())}
        os.environ |= {name: value for name, value in launching.SETTINGS.items() if name not in os.environ}
        for name in options.models.split(","):
            job = _write_job(Path(scratch), name, steps=options.steps)
            wanted = _train(job, None, ranks=1, accumulation=1)
            for strategy, ranks, accumulation in _cells([int(each) for each in options.ranks.split(",")]):
                found = _train(job, strategy, ranks=ranks, accumulation=accumulation).differences(wanted)
                largest = max(largest, *found)
                cells = [name, strategy or "single", str(ranks), str(accumulation), *(f"{each:.0e}" for each in found)]
                table.add_row(*cells)
                print(*cells, file=sys.stderr, flush=True)
    Console().print(table)
    return int(not largest <= TOLERANCE)


def _cells(ranks: list[int]) -> Iterator[tuple[str | None, int, int]]:
    yield None, 1, 4
    for strategy in STRATEGIES:
        for count in ranks:
            for accumulation in ACCUMULATIONS:
                yield strategy, count, accumulation


def _write_job(folder: Path, name: str, *, steps: int) -> Path:
    rows, draw = folder / "rows.jsonl", random.Random(1)
    rows.write_text("".join(json.dumps(_row(draw)) + "\n" for _ in range(2 * GLOBAL_BATCH)))
    kind = name.removesuffix("-lora")
    job = {
        "run": {"folder": "runs/x", "seed": 7},
        "model": {
            "from_config": {"model_type": kind, "values": MODELS[kind]},
            "tokenizer": {"train": {"vocabulary_size": 320}},
        },
        "data": {
            "train": {"path": "rows.jsonl"},
            "max_length": 128,
            "chat_template": "chatml",
            "cache_folder": "cache",
        },
        "task": {"name": "sft"},
        "train": {
            **{"global_batch_size": GLOBAL_BATCH, "microbatch_size": GLOBAL_BATCH, "steps": steps},
            **{"learning_rate": 1e-3, "router_aux_loss": 0.1, "schedule": {"name": "constant"}},
            "optimizer": {"eps": 1e-6},  # a gradient that is rounding alone moves nothing
        },
        "report": {"console": "plain", "log_every_steps": 1},
    }
    path = folder / f"{name}.json.yaml"
    path.write_text(json.dumps(job))
    return path


def _row(draw: random.Random) -> dict[str, Any]:
    words = draw.choices(WORDS, k=draw.randint(1, 12))
    turns = {"user": f"reverse: {' '.join(words)}", "assistant": " ".join(reversed(words))}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def _train(job: Path, strategy: str | None, *, ranks: int, accumulation: int) -> Result:
    label = f"{job.name.partition('.')[0]}-{strategy}-{ranks}-{accumulation}"
    run, microbatch = job.parent / "runs" / label, GLOBAL_BATCH // (ranks * accumulation)
    words = ["-m", "finetune", "--config", str(job), "--set", f"run.folder={run}"]
    words += ["--set", f"train.microbatch_size={microbatch}"]
    words += ["--set", LORA] if "-lora" in label else []
    command = (
        [sys.executable, *words]
        if strategy is None
        else launching.accelerate_command(strategy, *words, processes=ranks)
    )
    log = job.parent / "logs" / label
    assert launching.run(command, log=log, timeout_seconds=600) == 0, log.read_text()[-3000:]
    steps = [event for event in read_events(run / "events.jsonl") if event["event"] == "StepTaken"]
    weights = {name: each for path in (run / "final").glob("*.safetensors") for name, each in load_file(path).items()}
    losses = tuple(float(step["loss"]) for step in steps)
    return Result(losses, tuple(float(step["metrics"]["router_aux_loss"]) for step in steps), weights)


def _relative(found: tuple[float, ...], wanted: tuple[float, ...]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


if __name__ == "__main__":
    sys.exit(main())
