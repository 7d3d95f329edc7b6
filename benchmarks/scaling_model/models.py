"""Models by their sizes: those of the published runs, and those that the curves are drawn for."""

from dataclasses import dataclass, replace

from finetune.commands.plan.assumptions import ADAPTED_TRAFFIC_PER_FEATURE, TRAFFIC_PER_INTERMEDIATE
from finetune.commands.plan.step_time import Work
from finetune.model.kernels.compilation import FUSED_TRAFFIC_PER_HIDDEN, TRAFFIC_PER_HIDDEN


@dataclass(frozen=True)
class Model:
    """A decoder. `parameters` includes the embedding once, or twice where it is not tied to the head."""

    parameters: float
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    is_fused: bool = False  # kernels fused by hand or by torch.compile

    def work(
        self,
        length: int,
        samples: int,
        microbatches: int,
        recomputed: float,
        *,
        is_lora: bool = False,
        gradient_bytes: float = 4.0,
    ) -> Work:
        """Return the work of a step as `step_work` makes it, with the FLOPs that a tracer counts.

        These are 6 per weight and token, and 14 x layers x hidden x length for attention, 4 of them forward. FSDP2 and
        ZeRO reduce gradients in float32.
        """
        embedding = self.vocabulary * self.hidden
        weights = self.parameters - (0 if self.is_tied else embedding)
        attention = 14 * self.layers * self.hidden * length
        traffic = FUSED_TRAFFIC_PER_HIDDEN if self.is_fused else TRAFFIC_PER_HIDDEN
        per_layer = traffic * self.hidden + TRAFFIC_PER_INTERMEDIATE * self.intermediate
        if is_lora:  # in all layers, of which the keys' and values' are as wide as the queries'
            per_layer += ADAPTED_TRAFFIC_PER_FEATURE * (11 * self.hidden + 3 * self.intermediate)
        trained = 0.01 * self.parameters if is_lora else self.parameters
        return Work(
            num_tokens=samples * length,
            num_microbatches=microbatches,
            flops_per_token=(4 if is_lora else 6) * weights + attention,
            recomputed_flops_per_token=recomputed * (2 * (weights - embedding) + attention * 2 / 7),
            attention_flops_per_token=attention * (1 + recomputed * 2 / 7),
            traffic_per_token=self.layers * per_layer,
            num_layers=self.layers,
            num_parameters=int(self.parameters),
            num_trained=int(trained),
            weight_bytes=2 * self.parameters,
            gradient_bytes=gradient_bytes * trained,
            trained_weight_bytes=2 * trained,
        )


def fused(model: Model) -> Model:
    """Return the model with fused kernels."""
    return replace(model, is_fused=True)


LLAMA_1B = Model(1.236e9, 16, 2048, 8192, 128256, is_tied=True)
LLAMA_8B = Model(8.03e9, 32, 4096, 14336, 128256)
LLAMA_13B = Model(14.84e9, 40, 5120, 17920, 128256)
LLAMA_70B = Model(70.55e9, 80, 8192, 28672, 128256)
LLAMA_405B = Model(405e9, 126, 16384, 53248, 128256)
QWEN_7B = Model(7.72e9, 32, 4096, 11008, 151936)

LLAMA_2 = {
    "7B": Model(6.74e9, 32, 4096, 11008, 32000),
    "13B": Model(13.02e9, 40, 5120, 13824, 32000),
    "34B": Model(33.7e9, 48, 8192, 22016, 32000),
    "70B": Model(68.98e9, 80, 8192, 28672, 32000),
}

MPT = {
    name: Model(parameters, layers, hidden, 4 * hidden, 50368, is_tied=True, is_fused=True)
    for name, parameters, layers, hidden in (
        ("125M", 125_311_488, 12, 768),
        ("350M", 355_985_408, 24, 1024),
        ("760M", 760_470_528, 24, 1536),
        ("1B", 1_315_950_592, 24, 2048),
        ("3B", 2_651_837_440, 32, 2560),
        ("7B", 6_658_859_008, 32, 4096),
        ("13B", 12_853_954_560, 40, 5120),
        ("30B", 29_975_214_080, 48, 7168),
        ("70B", 64_862_437_376, 80, 8192),
    )
}

GPT_175B = Model(174.6e9, 96, 12288, 49152, 51200, is_tied=True, is_fused=True)
GPT_530B = Model(529.6e9, 105, 20480, 81920, 51200, is_tied=True, is_fused=True)
T5_11B = Model(11.3e9, 48, 1024, 65536, 32128, is_tied=True)
"""As a decoder: its encoder's 24 layers and its decoder's 24, one after the other."""

LLAMA_3 = {"1B": LLAMA_1B, "8B": LLAMA_8B, "70B": LLAMA_70B}
"""The models of the curves."""
