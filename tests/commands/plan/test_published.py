"""The cost model against throughputs that others have measured and published. docs/planning.md has the same table.

`python -m tests.commands.plan.test_published` prints it.
"""

from dataclasses import dataclass, replace
from statistics import median

import pytest

from finetune.commands.plan.cost.step_time import Work, step_time
from finetune.commands.plan.hardware import parse_hardware
from finetune.commands.plan.work import (
    ADAPTED_TRAFFIC_PER_HIDDEN,
    FUSED_TRAFFIC_PER_HIDDEN,
    TRAFFIC_PER_HIDDEN,
    TRAFFIC_PER_INTERMEDIATE,
)


@dataclass(frozen=True)
class Model:
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    is_fused: bool = False  # kernels fused by hand or by torch.compile

    def work(self, *, length: int, samples: int, microbatches: int, recomputed: float, is_lora: bool) -> Work:
        """Work as `step_work` makes it, with the FLOPs that a tracer counts: 6 per weight, 12 layers hidden length."""
        embedding = self.vocabulary * self.hidden
        weights = self.parameters - (0 if self.is_tied else embedding)
        attention = 12 * self.layers * self.hidden * length
        traffic = FUSED_TRAFFIC_PER_HIDDEN if self.is_fused else TRAFFIC_PER_HIDDEN
        traffic += ADAPTED_TRAFFIC_PER_HIDDEN if is_lora else 0
        trained = 0.01 * self.parameters if is_lora else self.parameters
        return Work(
            num_tokens=samples * length,
            num_microbatches=microbatches,
            flops_per_token=(4 if is_lora else 6) * weights + attention,
            recomputed_flops_per_token=recomputed * (2 * (weights - embedding) + attention / 3),
            traffic_per_token=self.layers * (traffic * self.hidden + TRAFFIC_PER_INTERMEDIATE * self.intermediate),
            num_layers=self.layers,
            num_parameters=int(self.parameters),
            num_trained=int(trained),
            weight_bytes=2 * self.parameters,
            gradient_bytes=4 * trained,
            trained_weight_bytes=2 * trained,
        )


@dataclass(frozen=True)
class Published:
    source: str
    model: Model
    gpus: str
    strategy: str
    length: int
    samples: int
    microbatches: int
    recomputed: float  # 0: nothing, 1: every layer, 0.5: every second matrix product
    tokens_per_second_per_gpu: float
    nodes: int | None = None
    memory_bandwidth: float | None = None  # where the source's differs from the table's
    is_lora: bool = False

    @property
    def modelled(self) -> float:
        """Tokens per second and GPU by the cost model."""
        hardware = parse_hardware(self.gpus, num_nodes=self.nodes)
        device = hardware.device("bf16")
        if self.memory_bandwidth is not None:
            device = replace(device, memory_bandwidth=self.memory_bandwidth)
        work = self.model.work(
            length=self.length,
            samples=self.samples,
            microbatches=self.microbatches,
            recomputed=self.recomputed,
            is_lora=self.is_lora,
        )
        return work.tokens_per_step / step_time(self.strategy, work, device=device, cluster=hardware.cluster).seconds

    @property
    def error(self) -> float:
        """How much faster the model is than the measurement, as a share of it."""
        return self.modelled / self.tokens_per_second_per_gpu - 1


LLAMA_8B = Model(8.03e9, 32, 4096, 14336, 128256)
LLAMA_70B = Model(70.55e9, 80, 8192, 28672, 128256)
LLAMA_13B = Model(14.84e9, 40, 5120, 17920, 128256)
MPT = {
    "125M": Model(125_311_488, 12, 768, 3072, 50368, is_tied=True, is_fused=True),
    "1B": Model(1_315_950_592, 24, 2048, 8192, 50368, is_tied=True, is_fused=True),
    "7B": Model(6_658_859_008, 32, 4096, 16384, 50368, is_tied=True, is_fused=True),
    "30B": Model(29_975_214_080, 48, 7168, 28672, 50368, is_tied=True, is_fused=True),
    "70B": Model(64_862_437_376, 80, 8192, 32768, 50368, is_tied=True, is_fused=True),
}
QWEN_7B = Model(7.72e9, 32, 4096, 11008, 151936)

_TITAN = "torchtitan, docs/performance.md"
_TITAN_H100 = "torchtitan, benchmarks/llama3_h100 (500 W, 2.4 TB/s)"
_MOSAIC = "LLM-foundry, scripts/train/benchmarking"
_KEMPNER = "KempnerForge, mfu_scaling_2026-04-05"
_QWEN = "Qwen, README, profiling of memory and speed"

PUBLISHED = (
    Published(_TITAN_H100, LLAMA_8B, "8xH100", "fsdp2", 8192, 2, 1, 0.5, 5762, memory_bandwidth=2.4e12),
    Published(
        f"{_TITAN_H100}, compiled",
        replace(LLAMA_8B, is_fused=True),
        *("8xH100", "fsdp2", 8192, 2, 1, 0.5, 6667),
        memory_bandwidth=2.4e12,
    ),
    Published(_TITAN, LLAMA_8B, "64xA100-80GB", "fsdp2", 8192, 1, 1, 0.5, 2973),
    Published(_TITAN, LLAMA_70B, "64xA100-80GB", "fsdp2", 8192, 1, 1, 1, 331),
    Published(_MOSAIC, MPT["7B"], "8xH100", "fsdp2", 2048, 6, 1, 0, 10643),
    Published(_MOSAIC, MPT["7B"], "8xH100", "fsdp2", 4096, 16, 2, 1, 8611),
    Published(_MOSAIC, MPT["7B"], "8xA100-80GB", "fsdp2", 2048, 6, 2, 0, 4641),
    Published(_MOSAIC, MPT["30B"], "8xH100", "fsdp2", 2048, 3, 21, 1, 2002),
    Published(_MOSAIC, MPT["30B"], "32xH100", "fsdp2", 2048, 14, 3, 1, 2308),
    Published(_MOSAIC, MPT["30B"], "8xA100-80GB", "fsdp2", 2048, 3, 21, 1, 916),
    Published(_MOSAIC, MPT["1B"], "8xH100", "fsdp2", 2048, 14, 1, 0, 45455),
    Published(_MOSAIC, MPT["1B"], "8xA100-80GB", "fsdp2", 2048, 14, 4, 0, 20513),
    Published(_MOSAIC, MPT["125M"], "8xA100-80GB", "fsdp2", 2048, 32, 2, 0, 141737),
    Published(_MOSAIC, MPT["70B"], "64xH100", "fsdp2", 2048, 8, 4, 1, 1039),
    Published(_MOSAIC, MPT["70B"], "64xA100-80GB", "fsdp2", 2048, 8, 4, 1, 410),
    Published(_MOSAIC, MPT["7B"], "128xA100-40GB", "fsdp2", 2048, 18, 1, 1, 3623),
    Published(_KEMPNER, replace(LLAMA_8B, is_fused=True), "1xH200", "single", 4096, 4, 2, 1, 10471),
    Published(_KEMPNER, replace(LLAMA_8B, is_fused=True), "4xH200", "fsdp2", 4096, 4, 2, 1, 9746),
    Published(_KEMPNER, LLAMA_13B, "4xH200", "fsdp2", 4096, 4, 4, 1, 4426, nodes=2),
    Published(_QWEN, QWEN_7B, "1xA100-80GB", "single", 2048, 1, 8, 1, 8 * 2048 / 5.2, is_lora=True),
    Published(_QWEN, QWEN_7B, "1xA100-80GB", "single", 1024, 1, 8, 1, 8 * 1024 / 2.8, is_lora=True),
)


@pytest.mark.parametrize(
    "each", PUBLISHED, ids=lambda each: f"{each.gpus} {each.length} {each.source.partition(',')[0]}"
)
def test_each_published_throughput_is_met_within_a_quarter(each: Published):
    assert abs(each.error) < 0.25, f"{each.modelled:,.0f} against {each.tokens_per_second_per_gpu:,.0f}"


def test_half_of_them_are_met_within_a_ninth_and_the_errors_are_on_both_sides():
    errors = [each.error for each in PUBLISHED]
    assert len(errors) >= 20
    assert median(abs(error) for error in errors) < 0.11
    assert abs(median(errors)) < 0.06


def markdown() -> str:
    """Return the table of the page."""
    rows = [
        "| published | model | GPUs | tokens x samples | measured | modelled | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in PUBLISHED:
        kind = f"{each.model.parameters / 1e9:.3g}B{' LoRA' if each.is_lora else ''}"
        gpus = each.gpus if each.nodes is None else f"{each.nodes} x {each.gpus}"
        measured, modelled = f"{each.tokens_per_second_per_gpu:,.0f}", f"{each.modelled:,.0f}"
        shape = f"{each.length} x {each.samples} x {each.microbatches}"
        rows.append(f"| {each.source} | {kind} | {gpus} | {shape} | {measured} | {modelled} | {each.error:+.0%} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
