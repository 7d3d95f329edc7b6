"""Rehearses many jobs and prints a table: every accelerate file x three architectures, recipes, tasks, odd jobs.

    python benchmarks/rehearsals.py [--folder FOLDER] [--only WORD ...] [--processes 2]

Models are configs of real size with a tokenizer trained on the spot, without weights. A row is ok, or names the phase
that failed and its error; `expected` says where a refusal is right. `--only zero3 moe` runs the cases whose names hold
all these words. A case takes one to three minutes on two cores; all of them take about two hours.
Results: experiments/rehearsals.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "finetune" / "recipes"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama",
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "moe": {
        "model_type": "qwen3_moe",
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_experts": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768},
    },
    "hybrid": {
        "model_type": "granitemoehybrid",
        **{"hidden_size": 4096, "intermediate_size": 512, "num_hidden_layers": 40, "num_local_experts": 0},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "shared_intermediate_size": 12288},
        **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128},
        "layer_types": [("attention" if layer % 10 == 5 else "mamba") for layer in range(40)],
    },
}
ENCODER = {
    "model_type": "bert",
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
VISION = {
    "model_type": "vit",
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "[MASK]", "[CLS]", "[SEP]"]


@dataclass(frozen=True)
class Case:
    """A job and an accelerate file; `expected` is the phase that has to refuse it, empty where all has to pass."""

    name: str
    job: Path
    accelerate: str
    processes: int
    expected: str = ""
    overrides: tuple[str, ...] = ()


def main() -> int:
    """Rehearse the chosen cases and return 1 where one does not end as expected."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder)
        cases = make_cases(folder, options.processes)
        ended = [run_case(case) for case in cases if all(word in case.name for word in options.only)]
        return int(not all(ended))


def run_case(case: Case) -> bool:
    """Rehearse one job, print its row, and return whether it ended as expected."""
    command = [sys.executable, "-m", "finetune", "rehearse", "--config", str(case.job), "--json"]
    command += ["--accelerate", str(ROOT / "accelerate_configs" / f"{case.accelerate}.yaml")]
    command += ["--processes", str(case.processes)]
    for override in case.overrides:
        command += ["--set", override]
    start = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), check=False)
    seconds = time.monotonic() - start
    try:
        said = json.loads(ended.stdout[ended.stdout.index("{") :])
    except ValueError:
        said = {"failed": {"phase": "none", "error": (ended.stderr or ended.stdout)[-300:]}, "proved": []}
    phase = said["failed"]["phase"] if said["failed"] else ""
    is_expected = phase == case.expected
    verdict = "ok" if not phase else f"refused at {phase}" if is_expected else f"FAILED at {phase}"
    detail = " ".join(said["failed"]["error"].split())[:160] if said["failed"] else _evidence(said)
    print(f"| {case.name} | {case.processes} | {verdict} | {seconds:.0f} s | {detail} |", flush=True)
    return is_expected


def _evidence(said: dict[str, Any]) -> str:
    wanted = [each["evidence"] for each in said["proved"] if each["phase"] in ("steps", "export")]
    return "; ".join(text.split(": verified")[0] for text in wanted if not text.startswith("final/"))[:160]


def make_inputs(folder: Path) -> None:
    """Write rows, images and the folders of the models."""
    questions = [f"How much is {n} times {n % 7} plus {n // 3}?" for n in range(400)]
    pairs = [
        (text, f"It is {n * (n % 7) + n // 3}, as {n} times {n % 7} is {n * (n % 7)}.")
        for n, text in enumerate(questions)
    ]
    _write_rows(folder / "sft.jsonl", [{"prompt": one, "completion": other} for one, other in pairs])
    _write_rows(
        folder / "dpo.jsonl", [{"prompt": one, "chosen": two, "rejected": "I do not know."} for one, two in pairs]
    )
    _write_rows(folder / "pairs.jsonl", [{"anchor": one, "positive": other} for one, other in pairs])
    _write_rows(
        folder / "labelled.jsonl", [{"text": one, "label": ("odd", "even")[n % 2]} for n, (one, _) in enumerate(pairs)]
    )
    for label, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (folder / "images" / label).mkdir(parents=True, exist_ok=True)
        for number in range(24):
            Image.new("RGB", (32, 32), colour).save(folder / "images" / label / f"{number}.png")
    texts = [text for pair in pairs for text in pair]
    for name, values in {**ARCHITECTURES, "encoder": ENCODER, "vision": VISION}.items():
        _write_model(folder / name, values, texts=texts)
    kind = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "./dense"}
    LoraConfig(r=8, lora_alpha=16, **kind).save_pretrained(folder / "adapter")


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_model(folder: Path, values: dict[str, Any], *, texts: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    kind = {**values}
    if kind["model_type"] == "vit":
        AutoConfig.for_model(kind.pop("model_type"), **kind).save_pretrained(folder)
        sizes = {"size": {"height": 224, "width": 224}, "image_processor_type": "ViTImageProcessor"}
        normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_normalize": True}
        (folder / "preprocessor_config.json").write_text(json.dumps({**sizes, **normal}))
        return
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(texts, trainer)
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    more = {"mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if kind["model_type"] == "bert" else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **names, **more)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": None}
    AutoConfig.for_model(kind.pop("model_type"), vocab_size=32000, **ids, **kind).save_pretrained(folder)


def make_cases(folder: Path, processes: int) -> Iterator[Case]:
    """Yield all cases; their job files are written into the folder."""
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        count = 4 if "hsdp" in file.stem else 1 if file.stem == "single" else processes
        for name in ARCHITECTURES:
            lora = {"lora": {"rank": 8, "alpha": 16.0}} if "zero3" in file.stem or "fsdp2" in file.stem else {}
            job = _write_job(folder / f"{name}{'-lora' if lora else ''}.yaml", {"model": {"name": f"./{name}", **lora}})
            yield Case(f"{file.stem} {name}", job, file.stem, count, "")
    yield from _task_cases(folder, processes)
    yield from _odd_cases(folder, processes)
    for recipe in sorted(RECIPES.glob("*.yaml")):
        values = yaml.safe_load(recipe.read_text())
        is_whole = recipe.stem in ("quickstart", "image-digits")
        expected = "" if is_whole else "job" if "path" in values["data"]["train"] else "model"  # no rows; no network
        yield Case(f"recipe {recipe.stem}", _copied_recipe(recipe, folder), "ddp", processes, expected)


def _task_cases(folder: Path, processes: int) -> Iterator[Case]:
    dense, encoder = {"name": "./dense"}, {"name": "./encoder"}
    tasks = {
        "preference": ({"model": dense, "task": {"name": "preference"}}, "dpo.jsonl"),
        "embedding": ({"model": encoder, "task": {"name": "embedding"}}, "pairs.jsonl"),
        "classification": ({"model": encoder, "task": {"name": "text_classification"}}, "labelled.jsonl"),
        "images": ({"model": {"name": "./vision"}, "task": {"name": "image_classification"}}, "images"),
        "teacher": (
            {"model": dense, "task": {"name": "distillation", "distillation": {"teacher": "./dense"}}},
            "sft.jsonl",
        ),
    }
    for name, (values, rows) in tasks.items():
        lengths = {} if name == "images" else {"max_length": 128}
        job = _write_job(folder / f"task-{name}.yaml", {**values, "data": {"train": {"path": rows}, **lengths}})
        yield Case(f"task {name}", job, "zero2" if name == "preference" else "ddp", processes)


def _odd_cases(folder: Path, processes: int) -> Iterator[Case]:
    dense = {"name": "./dense"}
    jobs: dict[str, tuple[dict[str, Any], str, int]] = {
        "three processes": ({"model": dense, "train": {"global_batch_size": 48, "microbatch_size": 1}}, "fsdp2", 3),
        "last layer only": ({"model": {**dense, "train_only": ["model.layers.31.*"]}}, "ddp", processes),
        "lora layers 16-31": (
            {"model": {**dense, "lora": {"rank": 8, "layers": list(range(16, 32))}}},
            "zero3",
            processes,
        ),
        "saved adapter": ({"model": {**dense, "adapter": "./adapter"}}, "fsdp2", processes),
        "microbatch auto": ({"model": dense, "train": {"microbatch_size": "auto"}}, "fsdp2", processes),
        "resume from a path": ({"model": dense, "checkpoint": {"resume": "./dense"}}, "ddp", processes),
        "remote folder": ({"model": dense, "run": {"folder": "s3://bucket/run"}}, "ddp", processes),
        "streamed rows": (
            {
                "model": dense,
                "data": {"train": {"path": "sft.jsonl", "stream": {"window_rows": 64}}, "max_length": 128},
                "train": {"epochs": None, "steps": 100},
            },
            "ddp",
            processes,
        ),
    }
    for name, (values, accelerate, count) in jobs.items():
        yield Case(f"odd {name}", _write_job(folder / f"odd-{name.split()[0]}.yaml", values), accelerate, count)


def _write_job(path: Path, changes: dict[str, Any]) -> Path:
    job: dict[str, Any] = {
        "run": {"folder": "runs/real"},
        "data": {"train": {"path": "sft.jsonl"}, "max_length": 128},
        "task": {"name": "sft"},
        "train": {"global_batch_size": 64, "microbatch_size": 2, "epochs": 1, "learning_rate": 2e-5},
        "checkpoint": {"every_steps": 100},
    }
    for name, values in changes.items():
        job[name] = {**values} if name in ("data", "task") else {**job.get(name, {}), **values}
    job["train"] = {name: value for name, value in job["train"].items() if value is not None}
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def _copied_recipe(recipe: Path, folder: Path) -> Path:
    target = folder / recipe.name
    if recipe.stem in ("quickstart", "image-digits"):
        command = [sys.executable, "-m", "finetune", "init", recipe.stem, "--into", str(folder / recipe.stem)]
        if not (folder / recipe.stem).exists():
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        return folder / recipe.stem / "job.yaml"
    target.write_text(recipe.read_text())
    return target


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for models and jobs; default: a temporary one")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name holds")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
