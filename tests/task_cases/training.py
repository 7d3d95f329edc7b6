"""How parameters learn: groups with rates of their own, later beginnings, averages, noise and other optimizers."""

from tests.task_cases.case import LORA, Case
from tests.task_cases.language import SFT, conversations, loss_of_answers

PARTED_MATRICES = "muon makes whole matrices orthogonal; ZeRO hands the optimizer flattened parts (DeepSpeed 0.19)"

GROUPS = {
    "full": (
        "train.optimizer={layer_decay: 0.5, weight_decay: 0.1, rates: {'*norm*': 2.0, 'model.layers.1.mlp.*': 0.1}}",
        "train.unfreeze=[{patterns: ['model.layers.0.*'], after_steps: 2}]",
    ),
    "lora": (*LORA, "train.optimizer.lora_plus_ratio=16.0"),
}

AVERAGE = {"full": ("train.average={decay: 0.8, after_steps: 1}",)}

OTHERS = {
    "unfreeze": ("train.unfreeze=[{patterns: ['model.layers.0.*', '*embed*'], after_steps: 2}]",),
    "train_only": ("model.train_only=['*embed_tokens*']",),
    "noise": ("train.embedding_noise=20.0", "data.batching.padding_free=false"),
    "noise_row": ("train.embedding_noise=20.0", "data.batching.padding_free=true"),
    "muon": ("train.optimizer={name: muon, weight_decay: 0.1}",),
    "lora_muon": (*LORA, "train.optimizer.name=muon"),
    "sched_free": ("train.optimizer.name=schedule_free_adamw", "train.schedule={name: constant, warmup_steps: 2}"),
    "lion": ("train.optimizer={name: lion, weight_decay: 0.1}", "train.learning_rate=1e-4"),
    "lora_ema": (*LORA, "train.average={decay: 0.8}"),
    "compiled": ("model.compile=regional", "model.gradient_checkpointing=true"),
    "comp_full": ("model.compile=full",),
    "comp_lora": (*LORA, "model.compile=regional", "data.batching.padding_free=true"),
}


def job(name: str) -> str:
    """Return the job of this name."""
    return SFT.replace("runs/sft", f"runs/{name}")


CASES = (
    Case("groups", job("groups"), conversations, "loss", loss_of_answers, variants=GROUPS),
    Case("average", job("average"), conversations, "loss", loss_of_answers, variants=AVERAGE),
    Case(
        "training",
        job("training"),
        conversations,
        "loss",
        loss_of_answers,
        variants=OTHERS,
        exempt={(muon, zero): PARTED_MATRICES for muon in ("muon", "lora_muon") for zero in ("zero2", "zero3")},
        is_extra=True,
    ),
)
