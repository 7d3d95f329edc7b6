"""Holds `finetune plan` against throughputs and memory that others have published: a job of each row, planned.

    python benchmarks/plan_published.py FOLDER          # 68 rows: ten minutes on two cores
    python benchmarks/plan_published.py FOLDER --fit    # repeats the fit of the assumptions, on the rows for it

FOLDER has `llm-foundry-mpt-throughput.csv` and `peft-metamathqa-l40s.csv`, in the form of their sources (llm-foundry,
scripts/train/benchmarking; peft, method_comparison/MetaMathQA). Prints Markdown, and writes it to
benchmarks/experiments/plan_published.md.

The assumptions were fitted to every second row of llm-foundry. The others, those of peft and of peers are held out. MPT
is described as StarCoder2, whose layers have the same shapes and products. Logits count as those who published
have them, for all positions at once, which this package does not do.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from finetune.commands.plan.assumptions import TRAINING_SHARE  # noqa: E402  # found by the line above
from finetune.commands.plan.hardware import Hardware, parse_hardware  # noqa: E402
from finetune.commands.plan.planned_job import DataCounts, PlannedJob  # noqa: E402
from finetune.commands.plan.step_time import step_time  # noqa: E402
from finetune.commands.plan.strategies import step_work  # noqa: E402
from finetune.config.load import load_config  # noqa: E402
from finetune.errors import ModelError  # noqa: E402
from finetune.memory.predict import MemoryPredictor  # noqa: E402
from finetune.memory.state import Prediction, StrategyName, TrainingLayout  # noqa: E402
from finetune.model.loading.architecture import load_model_config  # noqa: E402
from finetune.model.size import read_shapes  # noqa: E402
from finetune.run.setup.model_problems import resolve_padding_free  # noqa: E402

TARGET = ROOT / "benchmarks" / "experiments" / "plan_published.md"

FITTED, HELD_OUT = "fitted", "held out"

GPUS = {"h100_80gb": "H100-80GB", "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB"}
MPT = {  # layers, width, heads
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
LLAMA_3B = "hidden_size: 3072, intermediate_size: 8192, num_hidden_layers: 28, num_attention_heads: 24, "
LLAMA_8B = "hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, "
LLAMA_70B = "hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, num_attention_heads: 64, "
LLAMA_3 = "num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 131072"
QWEN_7B = (
    "hidden_size: 3584, intermediate_size: 18944, num_hidden_layers: 28, num_attention_heads: 28, "
    "num_key_value_heads: 4, vocab_size: 152064, tie_word_embeddings: false"
)
PEFT_KINDS = {  # what this package has of peft's experiments, by the beginning of their names
    "full-finetuning/": "",
    "ia3/llama-3.2-3B-default": "peft: {{type: ia3}}",
    "ia3/llama-3.2-3B-lr_0.001": "peft: {{type: ia3}}",
    "lora/llama-3.2-3B-rank10-target-mlp": "lora: {{rank: 10, target_modules: {modules}}}",
    "lora/llama-3.2-3B-rank32-dora": "lora: {{rank: 32, dora: true, target_modules: {modules}}}",
    "lora/llama-3.2-3B-rank64-rslora": "lora: {{rank: 64, rslora: true, target_modules: {modules}}}",
    "lora/llama-3.2-3B-rank64": "lora: {{rank: 64, target_modules: {modules}}}",
    "lora/llama-3.2-3B-rank32": "lora: {{rank: 32, target_modules: {modules}}}",
    "ln_tuning/": "train_only: ['*norm*']",
    "loha/": "peft: {{type: loha, values: {{r: 32, target_modules: {modules}}}}}",
    "lokr/": "peft: {{type: lokr, values: {{r: 32, target_modules: {modules}}}}}",
    "vera/": "peft: {{type: vera, values: {{r: 256, target_modules: {modules}}}}}",
    "oft/": "peft: {{type: oft, values: {{oft_block_size: 32, target_modules: {modules}}}}}",
    "prefixtuning/": "peft: {{type: prefix_tuning, values: {{num_virtual_tokens: 200}}}}",
}
PEFT_TOKENS = 4_198_051 / 20_000
"""Tokens of a sample on average: `tokens_total` of 5,000 steps of 4 samples, which are sorted by length."""

JOB = """
run: {{folder: {folder}/run}}
model:
  from_config: {{model_type: {model_type}, values: {{{values}}}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
  dtype: {dtype}
  gradient_checkpointing: {recomputes}
  compile: {compiles}
  kernels: none
  {adapter}
data: {{train: {{path: {folder}/rows.jsonl, format: text}}, max_length: {length}, over_length: truncate}}
task: {{name: pretrain}}
train:
  {{global_batch_size: {batch}, microbatch_size: {samples}, steps: 10, learning_rate: 1e-4, precision: {precision}}}
"""


@dataclass(frozen=True)
class Row:
    """A published run, as a job."""

    name: str
    gpus: str
    length: int
    samples: int
    microbatches: int
    tokens_per_second: float  # of one GPU
    model_type: str
    values: str
    part: str = HELD_OUT
    recomputes: bool = False
    adapter: str = ""
    dtype: str = "float32"
    compiles: str = "off"
    precision: str = "bf16"
    memory_gib: float | None = None
    logit_bytes: int = 4  # of one logit at the peak, as they have it
    tokens_per_sample: float | None = None  # fewer than the length
    memory_bandwidth: float | None = None
    tensor_size: int = 1  # GPUs that share every layer and a microbatch

    @property
    def hardware(self) -> Hardware:
        """Return the machines."""
        hardware = parse_hardware(self.gpus, num_nodes=None)
        bandwidth = self.memory_bandwidth or hardware.gpu.memory_bandwidth
        return replace(hardware, gpu=replace(hardware.gpu, memory_bandwidth=bandwidth))


@dataclass(frozen=True)
class Planned:
    """A row with what plan makes of it."""

    row: Row
    job: PlannedJob
    layout: TrainingLayout
    prediction: Prediction

    def tokens_per_second(self, *, training: float = 1.0, attention: float = 1.0) -> float:
        """Return the planned tokens per second of one GPU, with both shares multiplied by factors."""
        row, hardware = self.row, self.row.hardware
        fp8_share = self.job.fp8_share(self.prediction.flops_per_token, strategy=self.layout.strategy)
        device = hardware.device("bf16", fp8_share=fp8_share)
        device = replace(
            device, flops=device.flops * training, attention_share=device.attention_share * attention / training
        )
        work = step_work(self.job, self.layout, self.prediction, num_microbatches=row.microbatches)
        return (
            work.tokens_per_step
            / step_time(self.layout.strategy, work, device=device, cluster=hardware.cluster).seconds
            / row.tensor_size
        )

    @property
    def error(self) -> float:
        """Return how much faster the plan is than what was published, as a share of it."""
        return self.tokens_per_second() / self.row.tokens_per_second - 1

    @property
    def peak_bytes(self) -> int:
        """Return the planned peak, with logits counted as theirs."""
        shapes = self.job.shapes
        assert shapes is not None
        row = self.row
        return self.prediction.peak_bytes + row.samples * row.length * shapes.vocabulary * row.logit_bytes

    @property
    def fits(self) -> bool:
        """Return whether the plan would let it run; not asked of peers that also split tokens between layers."""
        return self.row.tensor_size > 1 or self.peak_bytes <= self.row.hardware.usable_bytes


def main() -> int:
    """Plan the rows, print and write the tables, and return the exit code: 1 where a row that ran does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the published tables")
    parser.add_argument("--fit", action="store_true", help="fit the shares of products and attention again")
    options = parser.parse_args()
    rows = [*peers(), *of_peft(options.folder), *of_llm_foundry(options.folder)]
    planned = []
    with tempfile.TemporaryDirectory(prefix="plan-published-") as scratch:
        for row in rows:
            try:
                planned.append(plan(row, Path(scratch)))
            except ModelError as error:
                print(f"{row.name}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    if options.fit:
        print(fit(planned))
        return 0
    text = page(planned)
    print(text)
    TARGET.write_text(text)
    return 0 if all(each.fits for each in planned) else 1


def of_llm_foundry(folder: Path) -> Iterator[Row]:
    """Yield two of eight rows in bf16, one for the fit and the held-out row after it, and all in fp8, held out."""
    with (folder / "llm-foundry-mpt-throughput.csv").open() as file:
        rows = list(csv.DictReader(file))
    in_bf16, in_fp8 = ([row for row in rows if ("fp8" in row["Precision"]) == is_fp8] for is_fp8 in (False, True))
    for number, row in [*enumerate(in_bf16), *((1, row) for row in in_fp8)]:
        if number % 8 > 1:
            continue
        layers, width, heads = MPT[row["Model"]]
        length, recomputes = int(row["SeqLen (T)"]), row["Activation Checkpointing"] == "True"
        yield Row(
            name=f"llm-foundry {row['Model']}{' fp8' if 'fp8' in row['Precision'] else ''}",
            gpus=f"{row['# GPUs']}x{GPUS[row['GPU']]}",
            length=length,
            samples=int(row["MicroBatchSize"]),
            microbatches=int(row["GradAccum"]),
            tokens_per_second=float(row["Throughput (T/s/GPU)"]),
            model_type="starcoder2",
            values=f"hidden_size: {width}, intermediate_size: {4 * width}, num_hidden_layers: {layers}, "
            f"num_attention_heads: {heads}, num_key_value_heads: {heads}, vocab_size: 50368, use_bias: false, "
            f"max_position_embeddings: {length}, residual_dropout: 0.0, embedding_dropout: 0.0",
            part=HELD_OUT if number % 2 else FITTED,
            recomputes=recomputes,
            compiles="regional",  # their norms, attention and loss are fused by hand
            precision="fp8" if "fp8" in row["Precision"] else "bf16",
        )


def of_peft(folder: Path) -> Iterator[Row]:
    """Yield the experiments with methods that this package has, other than prompts, which plan does not predict."""
    with (folder / "peft-metamathqa-l40s.csv").open() as file:
        for row in csv.DictReader(file):
            kind = next((kind for kind in PEFT_KINDS if row["experiment"].startswith(kind)), None)
            if kind is None or row["experiment"].endswith(("-bdlora", "-lorafa", "-mica")):
                continue
            yield Row(
                name=f"peft {row['experiment'].replace('llama-3.2-3B-', '')}",
                gpus="1xL40S",
                length=768,
                samples=int(row["batch_size"]),
                microbatches=1,
                tokens_per_second=float(row["tok_per_s_median"]),
                model_type="llama",
                values=f"{LLAMA_3B}{LLAMA_3}, tie_word_embeddings: true",
                adapter=PEFT_KINDS[kind].format(modules=row["target_modules"]),
                dtype="bfloat16",
                memory_gib=float(row["mem_max_GiB"]),
                logit_bytes=12,  # bfloat16, float32 log-probabilities and their gradient, the gradient in bfloat16
                tokens_per_sample=PEFT_TOKENS,
            )


def peers() -> Iterator[Row]:
    """Yield the runs of torchtitan (benchmarks/llama3_h100: 500 W, 2.4 TB/s) and NeMo AutoModel.

    torchtitan recomputes every second product: these are described as recomputing whole layers.
    """
    titan = {"gpus": "8xH100", "length": 8192, "samples": 2, "microbatches": 1, "memory_bandwidth": 2.4e12}
    llama = {"model_type": "llama", "values": f"{LLAMA_8B}{LLAMA_3}, tie_word_embeddings: false"}
    for name, rate, settings in (
        ("torchtitan 8B", 5762, {}),
        ("torchtitan 8B compiled", 6667, {"compiles": "regional"}),
        ("torchtitan 8B compiled fp8", 8532, {"compiles": "regional", "precision": "fp8"}),
    ):
        yield Row(name=name, tokens_per_second=rate, recomputes=True, **settings, **titan, **llama)  # type: ignore[arg-type]
    lora = {"gpus": "1xH100", "length": 4096, "samples": 1, "microbatches": 8, "dtype": "bfloat16"}
    adapter = {"adapter": "lora: {rank: 8}", "compiles": "regional"}
    qwen = {"model_type": "qwen2", "values": QWEN_7B}
    yield Row(name="NeMo AutoModel 8B LoRA", tokens_per_second=12473, **lora, **adapter, **llama)  # type: ignore[arg-type]
    yield Row(name="NeMo AutoModel Qwen2.5-7B LoRA", tokens_per_second=14110, **lora, **adapter, **qwen)  # type: ignore[arg-type]
    large = {"model_type": "llama", "values": f"{LLAMA_70B}{LLAMA_3}, tie_word_embeddings: false"}
    titan |= {"gpus": "256xH100", "samples": 16, "compiles": "regional", "recomputes": True}
    yield Row(name="torchtitan 70B, FSDP 32 x TP 8", tokens_per_second=597, tensor_size=8, **titan, **large)  # type: ignore[arg-type]
    lora |= {"gpus": "8xH100"}
    yield Row(
        name="NeMo AutoModel 70B LoRA, FSDP 4 x TP 2", tokens_per_second=1092, tensor_size=2, **lora, **adapter, **large
    )  # type: ignore[arg-type]


def plan(row: Row, scratch: Path) -> Planned:
    """Return the row's job with its symbolic step."""
    hardware = row.hardware
    (scratch / "rows.jsonl").write_text('{"text": "a row"}\n')
    written = {
        **asdict(row),
        "folder": scratch,
        "batch": row.samples * row.microbatches * hardware.num_gpus // row.tensor_size,
        "recomputes": str(row.recomputes).lower(),
    }
    path = scratch / "job.yaml"
    path.write_text(JOB.format(**written))
    config = load_config(path).config
    tokens = row.tokens_per_sample or row.length
    counts = DataCounts(tokens, None, is_measured=True, sentence="")
    job = PlannedJob(config, read_shapes(load_model_config(config.model)), counts)
    sharded: StrategyName = "fsdp2" if row.tensor_size == 1 else "fsdp2_tensor_parallel"
    layout = TrainingLayout(
        sharded if hardware.num_gpus > 1 else "single",
        hardware.num_gpus,
        job.method,
        row.recomputes,
        microbatch_size=row.samples,
        ranks_per_node=min(hardware.num_gpus, hardware.gpus_per_node),
        tensor_size=row.tensor_size,
    )
    print(f"{row.name} {row.gpus} {row.length}", file=sys.stderr, flush=True)
    return Planned(row, job, layout, MemoryPredictor(config, resolve_padding_free(config)).predict(layout))


def fit(planned: Sequence[Planned]) -> str:
    """Return the shares that fit the rows for it best: of products, and of attention on Ampere and on Hopper."""
    rows = [each for each in planned if each.row.part == FITTED]

    def errors(logarithms: np.ndarray) -> list[float]:
        training, ampere, hopper = np.exp(logarithms)
        return [
            float(
                np.log(
                    each.tokens_per_second(training=training, attention=hopper if "H100" in each.row.gpus else ampere)
                    / each.row.tokens_per_second
                )
            )
            for each in rows
        ]

    training, ampere, hopper = np.exp(least_squares(errors, np.zeros(3), loss="soft_l1", f_scale=0.1).x)
    return (
        f"{len(rows)} rows: TRAINING_SHARE {TRAINING_SHARE * training:.3f}; attention_share times "
        f"{ampere / training:.3f} on A100, {hopper / training:.3f} on H100"
    )


def page(planned: Sequence[Planned]) -> str:
    """Return the page."""
    foundry = [each for each in planned if each.row.name.startswith("llm-")]
    in_bf16 = [each for each in foundry if each.row.precision == "bf16"]
    parts = {
        "fitted (llm-foundry)": [each for each in in_bf16 if each.row.part == FITTED],
        "held out (llm-foundry)": [each for each in in_bf16 if each.row.part == HELD_OUT],
        "held out (llm-foundry, fp8)": [each for each in foundry if each.row.precision == "fp8"],
        "held out (peft)": [each for each in planned if each.row.name.startswith("peft")],
        "held out (torchtitan, NeMo)": [each for each in planned if each.row.name.startswith(("torchtitan", "NeMo"))],
        "all": planned,
    }
    lines = [
        "# `finetune plan` against published throughput and memory",
        "",
        "`python benchmarks/plan_published.py FOLDER`: each published run as a job, planned by its symbolic step and",
        "the cost model. Peaks have logits as those who published have them.",
        "",
        "| rows | number | within 10% | within 20% | within 30% | median error | do not fit in the plan |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in parts.items():
        if not rows:
            continue
        errors = np.array([each.error for each in rows])
        within = " | ".join(f"{np.mean(abs(errors) < limit):.0%}" for limit in (0.1, 0.2, 0.3))
        missed = sum(not each.fits for each in rows)
        lines.append(f"| {name} | {len(rows)} | {within} | {np.median(errors):+.0%} | {missed} |")
    lines += [
        "",
        "| published | GPUs | tokens x samples x microbatches | recomputed | tokens/s per GPU | planned | error | "
        "GiB | planned GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in planned:
        row = each.row
        memory = f"{row.memory_gib:.1f}" if row.memory_gib is not None else "ran"
        peak = f"{each.peak_bytes / 2**30:.1f}{'' if each.fits else ', does not fit'}"
        cells = (
            row.name + ("" if row.part == HELD_OUT else " *"),
            row.gpus,
            f"{row.length} x {row.samples} x {row.microbatches}",
            "yes" if row.recomputes else "no",
            f"{row.tokens_per_second:,.0f}",
            f"{each.tokens_per_second():,.0f}",
            f"{each.error:+.0%}",
            memory,
            peak,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "*: a row to which the assumptions were fitted."]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
