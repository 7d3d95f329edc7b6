"""`checkpoint:` - when the run saves itself, what it keeps, and where it continues."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import MAX_COUNT, Path, Positive, Section, Strings, key

_OTHER_SHAPE = "the checkpoint's adapters would not fit"
_OTHER_WEIGHTS = "the checkpoint holds other parameters than this run trains"
_OTHER_ROWS = "the position in the data would mean other rows: some would be repeated and some left out"

NEVER_ALLOWED: Mapping[str, str] = {
    "model.from_config": _OTHER_WEIGHTS,
    "model.from_config.model_type": _OTHER_WEIGHTS,
    "model.freeze": _OTHER_WEIGHTS,
    "model.lora": _OTHER_WEIGHTS,
    "model.lora.rank": _OTHER_SHAPE,
    "model.lora.target_modules": _OTHER_SHAPE,
    "model.lora.modules_to_save": _OTHER_SHAPE,
    "model.lora.dora": _OTHER_SHAPE,
    "model.lora.init": "the adapters stand on another rest of the base",
    "model.lora.layers": _OTHER_SHAPE,
    "model.lora.rank_pattern": _OTHER_SHAPE,
    **dict.fromkeys(("model.ia3", "model.oft"), _OTHER_WEIGHTS),
    **dict.fromkeys(("model.prompt_tuning", "model.prefix_tuning", "model.adapter"), _OTHER_WEIGHTS),
    "model.ia3.target_modules": _OTHER_SHAPE,
    "model.oft.block_size": _OTHER_SHAPE,
    "model.oft.target_modules": _OTHER_SHAPE,
    "model.prompt_tuning.num_tokens": _OTHER_SHAPE,
    "model.prefix_tuning.num_tokens": _OTHER_SHAPE,
    "model.new_tokens": _OTHER_WEIGHTS,
    "model.quantization": "what was learnt so far was learnt on top of other weights",
    "task.name": _OTHER_WEIGHTS,
    "task.classification.labels": "the same output would mean another class",
    "train.average": "the average of the steps so far is not there",
    "train.optimizer.name": "the state of one optimizer means nothing to another",
    "train.global_batch_size": _OTHER_ROWS,
    "run.seed": _OTHER_ROWS,
    "data.shuffle": _OTHER_ROWS,
    "training data": _OTHER_ROWS,
    "tokenizer": "the same text would be other tokens",
    "first adapter": "what was learnt so far was learnt from another one",
    "base weights": "what was learnt so far was learnt on top of the others",
}
"""What must be as it was in the checkpoint, and why not even `allow_changes` helps."""


class KeepBestSection(Section):
    """Keep the checkpoints that were best at an evaluation of the same step."""

    metric: str = key("Metric of the evaluation, such as `loss` or `exact_match`.", "loss")
    goal: Literal["minimize", "maximize"] = key("Which way is better.", "minimize")
    count: Positive = key("How many of the best to keep.", 1)


class CheckpointSection(Section):
    """When the run saves itself, what it keeps, and where it continues."""

    every_steps: Positive | None = key("Save every so many steps; unset, only at the end.", None)
    keep_last: Annotated[int, Field(ge=2, le=MAX_COUNT)] = key(
        "Newest checkpoints to keep; at least 2, as the last may be the one being written.", 2
    )
    keep_every_steps: Positive | None = key("Also keep, for good, the checkpoint of every so many steps.", None)
    keep_best: KeepBestSection | None = key("Also keep the best, as an evaluation at the same step judged them.", None)
    asynchronous: bool = key(
        "Write behind the training, which waits only while the state is copied to host memory. Takes host memory: the "
        "state's size divided by the number of processes.",
        True,
    )
    on_failure: Literal["stop", "continue"] = key(
        "When a checkpoint could not be written, three tries included: stop, or go on and try again when the next is "
        "due. The checkpoints before it stay as they are.",
        "stop",
    )
    rehearse: bool = key(
        "Before the first step, try what a save needs: permissions on every process, space, memory, gathering.", True
    )
    allow_changes: Strings = key(
        "Keys, such as `train.learning_rate`, that may differ from the run that wrote the checkpoint although they "
        "change the maths. Name them where a resume refuses them; a change that cannot be continued stays refused.",
        (),
    )
    resume: Literal["auto", "never"] | Path = key(
        "`auto`: from the newest valid checkpoint of `run.folder`, or from the start when there is none. "
        "`never`: refuse a folder that has checkpoints. Otherwise the path of a checkpoint.",
        "auto",
    )
