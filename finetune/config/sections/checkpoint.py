"""`checkpoint:` - when the run saves checkpoints, which it keeps, and where it resumes."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import MAX_COUNT, Name, Path, Positive, Section, Strings, key

_OTHER_SHAPE = "the checkpoint's adapters would not fit"
_OTHER_WEIGHTS = "the checkpoint holds different parameters than this run trains"
_OTHER_ROWS = "the position in the data would refer to other rows: some would be repeated and some left out"

NEVER_ALLOWED: Mapping[str, str] = {
    "model.from_config": _OTHER_WEIGHTS,
    "model.from_config.model_type": _OTHER_WEIGHTS,
    "model.freeze": _OTHER_WEIGHTS,
    "model.lora": _OTHER_WEIGHTS,
    "model.lora.rank": _OTHER_SHAPE,
    "model.lora.target_modules": _OTHER_SHAPE,
    "model.lora.modules_to_save": _OTHER_SHAPE,
    "model.lora.dora": _OTHER_SHAPE,
    "model.lora.init": "the adapters belong to a different residual of the base",
    "model.lora.layers": _OTHER_SHAPE,
    "model.lora.rank_pattern": _OTHER_SHAPE,
    **dict.fromkeys(("model.peft", "model.peft.type", "model.adapter"), _OTHER_WEIGHTS),
    "model.peft.values": _OTHER_SHAPE,
    "model.new_tokens": _OTHER_WEIGHTS,
    "model.quantization": "the training so far was on top of other weights",
    "task.name": _OTHER_WEIGHTS,
    "task.classification.labels": "the same output would mean another class",
    "train.average": "the average over the steps so far does not exist",
    "train.optimizer.name": "the state of one optimizer means nothing to another",
    "train.global_batch_size": _OTHER_ROWS,
    "run.seed": _OTHER_ROWS,
    "data.shuffle": _OTHER_ROWS,
    "training data": _OTHER_ROWS,
    "tokenizer": "the same text would give other tokens",
    "first adapter": "the training so far started from another one",
    "base weights": "the training so far was on top of the others",
    "tied weights": "until version 0.3, `modules_to_save` trained tied embeddings under a frozen head",
}
"""The keys that must match the checkpoint even with `allow_changes`, each with the reason."""


class KeepBestSection(Section):
    """Keep the checkpoints with the best evaluation at the same step."""

    metric: Name = key("Metric of the evaluation, such as `loss` or `exact_match`.", "loss")
    goal: Literal["minimize", "maximize"] = key("Whether a lower or a higher value is better.", "minimize")
    count: Positive = key("How many of the best to keep.", 1)


class CheckpointSection(Section):
    """When the run saves checkpoints, which it keeps, and where it resumes."""

    every_steps: Positive | None = key("Save every N steps; unset, only at the end.", None)
    keep_last: Annotated[int, Field(ge=2, le=MAX_COUNT)] = key(
        "Number of newest checkpoints to keep; at least 2, since the newest may still be being written.", 2
    )
    keep_every_steps: Positive | None = key("Also keep every checkpoint whose step is a multiple of N.", None)
    keep_best: KeepBestSection | None = key("Also keep the best, by an evaluation at the same step.", None)
    asynchronous: bool = key(
        "Write in the background: training waits only while the state is copied to host memory, which takes the size "
        "of the state divided by the number of processes.",
        True,
    )
    on_failure: Literal["stop", "continue"] = key(
        "When a checkpoint cannot be written in three attempts: stop, or continue and try again when the next one is "
        "due. Earlier checkpoints are kept.",
        "stop",
    )
    rehearse: bool = key(
        "Before the first step, test what saving needs: permissions of every process, disk space, memory, gathering.",
        True,
    )
    allow_changes: Strings = key(
        "Keys, such as `train.learning_rate`, that may differ from the run that wrote the checkpoint although they "
        "change the training. Name the keys that a resume refuses; a change that cannot be resumed from stays refused.",
        (),
    )
    resume: Literal["auto", "never"] | Path = key(
        "`auto`: resume from the newest valid checkpoint of `run.folder`, or start from scratch. "
        "`never`: refuse a folder that has checkpoints. Otherwise the path of a checkpoint.",
        "auto",
    )
