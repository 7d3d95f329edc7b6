"""How parameters learn: groups with rates of their own, later beginnings, averages, noise and other optimizers."""

from task_cases.case import LORA, Case
from task_cases.language import SFT, conversations, loss_of_answers

PARTED_MATRICES = "muon makes whole matrices orthogonal, and this strategy hands the optimizer parts of them, flattened"

TRAINING = SFT.replace("runs/sft", "runs/training").replace("steps: 4", "steps: 4, schedule: {name: constant}")

VARIANTS = {
    "layer_decay": (
        "train.optimizer={layer_decay: 0.5, weight_decay: 0.1, rates: {'*norm*': 2.0, 'model.layers.1.mlp.*': 0.1}}",
    ),
    "lora_plus": (*LORA, "train.optimizer.lora_plus_ratio=16.0"),
    "unfreeze": ("train.unfreeze=[{patterns: ['model.layers.0.*', '*embed*'], after_steps: 2}]",),
    "average": ("train.average={decay: 0.8, after_steps: 1}",),
    "embedding_noise": ("train.embedding_noise=20.0",),
    "muon": ("train.optimizer.name=muon",),
    "schedule_free": ("train.optimizer.name=schedule_free_adamw", "train.schedule.warmup_steps=2"),
    "train_only": ("model.train_only=['*embed_tokens*']",),
}

CASES = (
    Case(
        "training",
        TRAINING,
        conversations,
        "loss",
        loss_of_answers,
        variants=VARIANTS,
        exempt={("muon", strategy): PARTED_MATRICES for strategy in ("zero2", "zero3")},
    ),
)
