"""Trains, resumes, exports and merges every current architecture, whole and with LoRA, under every kind of strategy.

    python benchmarks/architectures.py                       # all; about half an hour on two cores
    python benchmarks/architectures.py --only llama mixtral --strategies single --folder /tmp/architectures

Prints a table in Markdown. A cell is verified by the run itself (`export.verify`): a fresh process loads the export
with plain transformers and peft and computes the logits of the trained model. Ends with 1 where a run failed after it
had trained, was silently partial, did not resume with the same losses or lost parity; an earlier refusal is a result.

Small models from their configs with random weights: nothing is downloaded. Each strategy is one launch of two processes
(`single`: one), in which the jobs follow each other; after a crash the rest is launched again.
"""

import argparse
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import verifier_server  # noqa: E402
from tests.task_cases.masked_lm import lines  # noqa: E402  # found by the line above

STRATEGIES = ("single", "fsdp2", "zero3")
VARIANTS: Mapping[str, Sequence[str]] = {
    "full": (),
    "lora": ("model.lora={rank: 4, alpha: 8.0}",),
    "merged": ("model.lora={rank: 4, alpha: 8.0}", "export.merge=true"),
}
STEPS, SAVED_AT = 4, 2
PARITY = 1e-4

WORDS = ["red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown"]

_BASE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 16, "head_dim": 8}
_ROUTED_EXPERTS = {
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_DELTA_RULE = {
    **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_LOCAL_AND_FULL = {
    **{"num_hidden_layers": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "sliding_window": 64},
    "vocab_size_per_layer_input": 320,
}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, and the config of a small one."""

    model_type: str
    values: Mapping[str, Any]
    leaves_out: Sequence[str] = ()  # of what the others have
    task: str = "sft"

    def config(self) -> dict[str, Any]:
        """Return the `from_config` section."""
        shared = {name: value for name, value in _BASE.items() if name not in self.leaves_out}
        return {"model_type": self.model_type, "values": {**shared, **self.values}}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", {}),
    "qwen2": Architecture("qwen2", {}),
    "qwen3": Architecture("qwen3", {"head_dim": 8}),
    "qwen3_moe": Architecture("qwen3_moe", {**_EXPERTS, "moe_intermediate_size": 16}),
    "qwen3_next": Architecture("qwen3_next", {**_SMALL_EXPERTS, **_DELTA_RULE, "shared_expert_intermediate_size": 16}),
    "qwen3_5": Architecture("qwen3_5_text", {**_DELTA_RULE, "head_dim": 8}),
    "qwen3_5_moe": Architecture(
        "qwen3_5_moe_text",
        {**_SMALL_EXPERTS, **_DELTA_RULE, "shared_expert_intermediate_size": 16},
        leaves_out=("intermediate_size",),
    ),
    "mixtral": Architecture("mixtral", _LOCAL_EXPERTS),
    "mistral": Architecture("mistral", {"sliding_window": 64}),
    "ministral3": Architecture("ministral3", {}),
    "gpt_oss": Architecture("gpt_oss", {**_LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 64}),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        {
            **_ROUTED_EXPERTS,
            **{"num_key_value_heads": 4, "n_group": 2, "kv_lora_rank": 16, "q_lora_rank": 16},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        },
    ),
    "glm4": Architecture("glm4", {"head_dim": 8}),
    "glm4_moe": Architecture("glm4_moe", _ROUTED_EXPERTS),
    "olmo3": Architecture("olmo3", {"sliding_window": 64}),
    "olmoe": Architecture("olmoe", _EXPERTS),
    "granitemoe": Architecture("granitemoe", _LOCAL_EXPERTS),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        {**_LOCAL_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **_LOCAL_AND_FULL,
            **{"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
            **{"laurel_rank": 8, "altup_num_inputs": 2},
        },
    ),
    "gemma4": Architecture("gemma4_text", _LOCAL_AND_FULL),
    "lfm2": Architecture("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "falcon_h1": Architecture("falcon_h1", {**_MAMBA, "mamba_d_ssm": 64}),
    "mamba2": Architecture(
        "mamba2",
        {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16},
            **{"n_groups": 1, "chunk_size": 16, "expand": 2},
        },
        leaves_out=tuple(_BASE),
    ),
    "modernbert": Architecture(
        "modernbert",
        {"local_attention": 32},
        leaves_out=("num_key_value_heads",),
        task="masked_lm",
    ),
}


@dataclass(frozen=True)
class Result:
    """What a run has left behind."""

    folder: Path

    @property
    def error(self) -> str | None:
        """Return its message where it failed."""
        path = self.folder / "error.txt"
        return path.read_text().split("\n", 1)[0] if path.exists() else None

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the run's events of that kind."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event.get("event") == name]

    @property
    def losses(self) -> dict[int, float]:
        """Return the loss of each step; a step that was taken twice has the later one."""
        return {int(event["step"]): float(event["loss"]) for event in self.events("StepTaken")}

    def message(self, *words: str) -> str:
        """Return the first message of the run with one of these words; empty for none."""
        found = [event.get("message", "") for event in self.events("Noted")]
        return next((text for text in found if any(word in text for word in words)), "")


def main() -> int:
    """Run what is asked for, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--folder", type=Path, help="where the runs are left; default: a temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(Path(options.worker))
    with tempfile.TemporaryDirectory(prefix="architectures-") as scratch:
        os.environ[verifier_server.ADDRESS] = str(
            Path(scratch) / "verifier"
        )  # all exports share the imports of their verification
        os.environ[verifier_server.OWNER] = str(os.getpid())
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        table, failures = run(folder, options.only, strategies=options.strategies, variants=options.variants)
    print(table)
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def run(
    folder: Path, names: Sequence[str], *, strategies: Sequence[str], variants: Sequence[str]
) -> tuple[str, list[str]]:
    """Run the cases of these architectures and return the table and what is wrong in it."""
    write_rows(folder)
    for strategy in strategies:
        launch(strategy, cases(folder, strategy, names, variants), folder)
    rows, failures = [], []
    for name in names:
        cells = []
        for variant in variants:
            for strategy in strategies:
                text, is_failure = judge(folder, name, strategy, variant)
                cells.append(text)
                failures += [f"{name} {variant} {strategy}: {text}"] if is_failure else []
        first = Result(place(folder, strategies[0], name, variants[0]))
        rows.append(
            f"| {name} | {first.message('padding-free', 'padded', 'end to end') or '-'} | {' | '.join(cells)} |"
        )
    titles = [f"{variant}, {strategy}" for variant in variants for strategy in strategies]
    head = [f"| architecture | layout | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    return "\n".join([*head, *rows]), failures


def place(folder: Path, strategy: str, name: str, variant: str) -> Path:
    """Return the folder of a run."""
    return folder / "runs" / strategy / f"{name}-{variant}"


def judge(folder: Path, name: str, strategy: str, variant: str) -> tuple[str, bool]:
    """Return the text of a cell, and whether it is a failure."""
    result = Result(place(folder, strategy, name, variant))
    resumed = Result(result.folder.with_name(f"{result.folder.name}-resumed"))
    if result.error is not None:
        is_failure = bool(result.losses) or result.error.startswith("fault: ")
        return f"{'failed' if is_failure else 'refused'}: {result.error[:300]}", is_failure
    verified = result.message("verified in a fresh process")
    if not verified:
        return "not verified", True
    if resumed.error is not None:
        return f"resume failed: {resumed.error[:300]}", True
    later = {step: loss for step, loss in result.losses.items() if step > SAVED_AT}
    if variant != "merged" and (len(later) != STEPS - SAVED_AT or not _are_close(resumed.losses, later, 1e-6)):
        return f"resumed with other losses: {resumed.losses} instead of {later}", True
    alone = Result(place(folder, "single", name, variant))
    if alone.losses and not _are_close(result.losses, alone.losses, PARITY):
        return f"other losses than on one process: {result.losses} instead of {alone.losses}", True
    within = verified.partition("within ")[2].partition(",")[0]
    return f"verified, {within or 'tensors'}", not within


def _are_close(found: Mapping[int, float], wanted: Mapping[int, float], tolerance: float) -> bool:
    return all(step in found and abs(found[step] - loss) <= tolerance * abs(loss) for step, loss in wanted.items())


def cases(folder: Path, strategy: str, names: Sequence[str], variants: Sequence[str]) -> list[dict[str, Any]]:
    """Return the jobs of a launch: each variant, and all but merges once more from their checkpoint."""
    jobs = []
    for name in names:
        architecture = ARCHITECTURES[name]
        job = folder / f"{name}.yaml"
        job.write_text(job_text(architecture))
        for variant in variants:
            target = place(folder, strategy, name, variant)
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(target.with_name(f"{target.name}-resumed"), ignore_errors=True)
            jobs.append({"job": str(job), "folder": str(target), "overrides": list(VARIANTS[variant]), "from": None})
            if variant != "merged":
                again = str(target.with_name(f"{target.name}-resumed"))
                jobs.append({**jobs[-1], "folder": again, "from": str(target)})
    return jobs


def job_text(architecture: Architecture) -> str:
    """Return the job of an architecture, as JSON, which is YAML."""
    is_masked = architecture.task == "masked_lm"
    data: dict[str, Any] = {"train": {"path": "train.txt" if is_masked else "train.jsonl"}, "max_length": 128}
    data |= {} if is_masked else {"chat_template": "chatml"}
    tokenizer = {"name": "./tokenizer"} if is_masked else {"train": {"vocabulary_size": 320}}
    return json.dumps(
        {
            "run": {"folder": "runs/default", "seed": 7},
            "model": {"from_config": architecture.config(), "tokenizer": tokenizer},
            "data": {**data, "cache_folder": "cache"},
            "task": {"name": architecture.task},
            "train": {"global_batch_size": 8, "microbatch_size": 2, "steps": STEPS, "learning_rate": 0.001},
            "checkpoint": {"every_steps": SAVED_AT, "keep_last": 2},
            "report": {"console": "plain", "log_every_steps": 1},
        },
        indent=1,
    )


def write_rows(folder: Path) -> None:
    """Write questions and answers of one to eight words; lines and a tokenizer with a mask for `masked_lm`."""
    chance = random.Random(1)
    rows = []
    for _ in range(48):
        words = chance.choices(WORDS, k=chance.randint(1, 8))
        rows.append({"prompt": f"reverse: {' '.join(words)}", "completion": " ".join(reversed(words))})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines(folder)


def launch(strategy: str, jobs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Run the jobs in one launch; where one ends it, it is marked as failed and the rest is launched again."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    while waiting := [job for job in jobs if not (Path(job["folder"]) / "done").exists()]:
        spec, log = folder / f"{strategy}.json", folder / f"{strategy}.log"
        spec.write_text(json.dumps(waiting))
        words = [str(Path(__file__).resolve()), "--worker", str(spec)]
        with log.open("ab") as output:
            code = subprocess.call(_command(strategy, words), stdout=output, stderr=output, env=environment)
        ended = next((job for job in waiting if not (Path(job["folder"]) / "done").exists()), None)
        if ended is not None:
            target = Path(ended["folder"])
            target.mkdir(parents=True, exist_ok=True)
            if not (target / "error.txt").exists():
                said = [line for line in log.read_text(errors="replace").splitlines() if "rror:" in line]
                (target / "error.txt").write_text(f"the launch ended with {code}: {(said or ['?'])[-1]}")
            (target / "done").touch()


def _command(strategy: str, words: Sequence[str]) -> list[str]:
    if strategy == "single":
        return [sys.executable, *words]
    config = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    start = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file", str(config)]
    return [*start, "--main_process_port", str(29500 + random.SystemRandom().randrange(2000)), *words]


def work(spec: Path) -> int:
    """Train the jobs of the spec, one after another, in these processes."""
    from unittest.mock import patch

    import torch

    from finetune.config.load import load_config
    from finetune.errors import FinetuneError
    from finetune.export.verify import verifier
    from finetune.run.train import train_from_config
    from finetune.runtime import distributed
    from tests.scenarios.trained import forget
    from tests.task_cases.worker import stay
    from tests.verifier_server import use_server

    torch.set_num_threads(1)
    use_server(verifier)
    for job in json.loads(spec.read_text()):
        target = Path(job["folder"])
        if distributed.is_main() and job["from"] is not None:
            _copy_checkpoint(Path(job["from"]), target)
        if distributed.is_distributed():
            torch.distributed.barrier()
        try:
            with patch.object(distributed, "shut_down", stay):
                train_from_config(load_config(Path(job["job"]), [f"run.folder={target}", *job["overrides"]]))
        except FinetuneError as error:
            _note(target, f"{error}\n{traceback.format_exc()}")
        except Exception as error:  # a fault of ours: the others go on
            _note(target, f"fault: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        forget()
        gc.collect()
        target.mkdir(parents=True, exist_ok=True)
        (target / "done").touch()
    return int(distributed.shut_down(0))


def _note(target: Path, text: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / "error.txt").write_text(text)


def _copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a run as it stood after its first checkpoint."""
    if not (source / "checkpoints").is_dir():
        return
    target.mkdir(parents=True)
    for name in ("config.yaml", "resolved.yaml", "environment.json"):
        if (source / name).exists():
            shutil.copy2(source / name, target / name)
    for name in ("inputs", f"checkpoints/step-{SAVED_AT:06d}"):
        shutil.copytree(source / name, target / name)


if __name__ == "__main__":
    sys.exit(main())
