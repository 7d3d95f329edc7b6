"""What saves memory and changes no number that matters: recomputed activations, moments in few bits."""

from tests.task_cases.case import LORA, Case
from tests.task_cases.language import conversations, loss_of_answers
from tests.task_cases.training import job

PARTED_ROWS = "moments in few bits go by a parameter's rows; ZeRO hands the optimizer flattened parts (DeepSpeed 0.19)"

SELECTIVE = "model.gradient_checkpointing=selective"
INT8 = "train.optimizer.state_dtype=int8"

CASES = (
    Case(
        "memory",
        job("memory"),
        conversations,
        "loss",
        loss_of_answers,
        variants={"full": (SELECTIVE, INT8), "lora": (*LORA, SELECTIVE)},
        exempt={("full", zero): PARTED_ROWS for zero in ("zero2", "zero3")},
    ),
    Case(
        "memory_more",
        job("memory_more"),
        conversations,
        "loss",
        loss_of_answers,
        variants={
            "recompute": ("model.gradient_checkpointing=true",),
            "every_2nd": ("model.gradient_checkpointing=2",),
            "selective": (SELECTIVE,),
            "lora_int8": (*LORA, INT8),
            "bf16": ("train.optimizer={state_dtype: bfloat16, weight_decay: 0.1}", "train.average={decay: 0.8}"),
        },
        exempt={(each, zero): PARTED_ROWS for each in ("lora_int8", "bf16") for zero in ("zero2", "zero3")},
        is_extra=True,
    ),
)
