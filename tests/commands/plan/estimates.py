"""A stand-in for the symbolic step: memory and FLOPs of a Llama by the usual arithmetic, in microseconds.

What `finetune.memory.predict` predicts is tested there; here only what a plan makes of predictions is.
"""

from dataclasses import dataclass

from finetune.memory.state import Prediction, TrainingLayout


@dataclass(frozen=True)
class LlamaEstimate:
    """A model of Llama's kind, trained on sequences of one length."""

    num_parameters: int
    num_layers: int
    hidden: int
    length: int
    master_bytes: int = 4  # of a trained weight: float32
    num_adapted: int = 80_000_000

    def __call__(self, layout: TrainingLayout) -> Prediction:
        trained = self.num_parameters if layout.method == "full" else self.num_adapted
        frozen = 0 if layout.method == "full" else self.num_parameters
        shards = {"single": 1, "ddp": 1, "hsdp": layout.ranks_per_node}.get(layout.strategy, layout.num_ranks)
        stage = {"zero1": 1, "zero2": 2, "zero2_offload": 2}.get(layout.strategy, 3)
        base = frozen * (0.6 if layout.method == "qlora" else 2)
        on_host = layout.strategy.endswith("_offload")
        tokens = layout.microbatch_size * self.length
        each = 34 * self.hidden if not layout.gradient_checkpointing else 2 * self.hidden
        parts = {
            "weights": (trained * self.master_bytes + base) / (shards if stage == 3 else 1),
            "gradients": 4 * trained / (shards if stage >= 2 else 1),
            "optimizer": 0 if on_host else 8 * trained / shards,
            "activations": tokens * self.num_layers * each + 40 * tokens * self.hidden,
            "libraries": 1 << 30,
        }
        sizes = {name: round(size) for name, size in parts.items() if size}
        forward = 2 * self.num_parameters + 4 * self.num_layers * self.hidden * self.length
        passes = 3 if layout.method == "full" else 2
        return Prediction(
            peak_bytes=sum(sizes.values()),
            parts=sizes,
            flops_per_token=passes * forward,
            recomputed_flops_per_token=forward if layout.gradient_checkpointing else 0.0,
            num_parameters=self.num_parameters + (0 if layout.method == "full" else self.num_adapted),
            num_trained=trained,
            num_adapted_features=0 if layout.method == "full" else 20 * self.num_layers * self.hidden,
        )


LLAMA_8B = LlamaEstimate(8_030_000_000, 32, 4096, length=4096)
LLAMA_70B = LlamaEstimate(70_550_000_000, 80, 8192, length=2048, num_adapted=200_000_000)
GPT_125M = LlamaEstimate(125_000_000, 12, 768, length=1024)
