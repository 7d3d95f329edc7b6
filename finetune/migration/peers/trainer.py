"""transformers' Trainer: what its arguments mean, for TRL and LLaMA-Factory, too."""

from finetune.migration.draft import Draft, KeyOutcome, PeerTrainer

ARGUMENTS = "transformers TrainingArguments"
"""The group of the defaults of all trainers that share these arguments."""


def prepare_arguments(draft: Draft) -> None:
    """Write what only Trainer's arguments have; run it before the common part."""
    draft.drop("`train.microbatch_size: auto` finds one", *(() if draft.get("finds_batch") else ("finds_batch",)))
    if draft.get("finds_batch"):
        draft.refuse("write `train.microbatch_size: auto`, which keeps the batch of a step.", "finds_batch")
    if draft.get("sampling") == "group_by_length":
        draft.put("data.batching.length_window_steps", 16, "sampling")
    elif draft.get("sampling") == "sequential":
        draft.put("data.shuffle", False, "sampling")
    draft.drop("rows are shuffled in every epoch", "sampling")
    if (draft.get("beta1", 0.9), draft.get("beta2", 0.999)) != (0.9, 0.999):
        draft.put("train.optimizer.betas", [draft.get("beta1", 0.9), draft.get("beta2", 0.999)], "beta1", "beta2")
    draft.drop("this is the default here, too", "beta1", "beta2")
    steps = draft.get("logging_steps", 500)
    if steps >= 1 and "logging_steps" in draft.facts:
        draft.put("report.log_every_steps", int(steps), "logging_steps")
    if draft.get("eval_strategy") == "steps" and draft.get("eval_steps") is None and steps >= 1:
        comment = "as often as `logging_steps`, since `eval_steps` is unset"
        draft.put("evaluate.every_steps", int(steps), "eval_strategy", comment=comment)
    draft.drop("`events.jsonl` has every step", "logging_steps")
    if draft.get("pushes") and draft.get("hub_name"):
        draft.put("export.push_to_hub", draft.get("hub_name"), "hub_name", "pushes")
        if draft.get("hub_private") is False:
            draft.put("export.private", False, "hub_private")
    elif draft.get("pushes"):
        draft.refuse("write the repository's name in `export.push_to_hub`.", "pushes")
    draft.drop("nothing is uploaded, or privately as here", "pushes", "hub_name", "hub_private")
    settings = {key: leaf for key, leaf in draft.file.leaves.items() if key.startswith("deepspeed.")}
    if settings:
        draft.facts["deepspeed"] = (draft.file.values["deepspeed"], next(iter(settings.values())))
        for key in settings:
            draft.outcomes[key] = KeyOutcome(
                "mapped", "accelerate file and its DeepSpeed config, which has our settings"
            )
    if draft.get("trackers") and draft.get("project"):
        draft.put("report.project", draft.get("project"), "project")
    draft.drop("there is no tracker", "project")


def finish_arguments(draft: Draft) -> None:
    """Note what Trainer does at the end of an epoch."""
    draft.note("Trainer takes a step with the last, incomplete batch of an epoch; here batches go on over epochs.")


def _prepare(draft: Draft) -> None:
    """Write the keys that a job needs and the arguments do not give."""
    prepare_arguments(draft)
    name_placeholders(draft)
    draft.default("task.name", "sft", "the arguments do not name the task: write it (docs/how-to/tasks.md)")
    draft.default("data.max_length", 1024, "the arguments do not have it: write it")
    draft.default("data.over_length", "truncate", "as with `truncation=True`")


PLACEHOLDERS = ("MODEL", "DATASET")
"""Names that are to be replaced in a job."""


def name_placeholders(draft: Draft) -> None:
    """Write names to be replaced, where the file names neither model nor rows."""
    draft.default("model.name", "MODEL", "not in the file: write the name or the path")
    if not draft.has("data.train"):
        draft.default("data.train.name", "DATASET", "not in the file: write the name, or `path`")
    if "MODEL" in (draft.value("model.name"), draft.value("data.train.name")):
        draft.note("the model or the rows are in a script: write their names in place of MODEL and DATASET.")


TRAINER = PeerTrainer(
    name="trainer",
    prepare=_prepare,
    finish=finish_arguments,
)
