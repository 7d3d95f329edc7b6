"""Each rule as a table: what is written over the small job, the key that is blamed, and a part of the sentence."""

import pytest

from finetune.config.rules.unused_keys import CONDITIONAL_KEYS, optimizer_keys, tracker_keys

VALIDATION = "data.validation.path=rows.jsonl"
EVALUATION = (VALIDATION, "evaluate.every_steps=5")

BATCH = [
    (["train.global_batch_size=30"], "train.global_batch_size", "Nearest that are: 28, 32."),
    (["train.global_batch_size=3"], "train.global_batch_size", "Nearest that are: 4."),
    (["train.steps=null"], "train", "Set one of `steps`, `epochs` or `tokens`"),
    (["train.epochs=1.5"], "train.epochs", "the budget is already set by `train.steps`"),
    (["train.tokens=100"], "train.tokens", "the budget is already set by `train.steps`"),
    (["train.schedule={warmup_steps: 10}"], "train.schedule.warmup_steps", "Write a smaller number"),
    (["train.schedule={warmup_steps: 2, warmup_fraction: 0.1}"], "train.schedule.warmup_fraction", "already set by"),
    (["train.schedule.warmup_fraction=1.0"], "train.schedule.warmup_fraction", "Write a smaller fraction."),
    (
        ["train.schedule={name: warmup_stable_decay, warmup_fraction: 0.5, decay_fraction: 0.6}"],
        "train.schedule.decay_fraction",
        "at most 0.5 is left",
    ),
    (["model.dtype=bfloat16"], "train.precision", "Write `precision: bf16`, or `model.dtype: float32`."),
    (["model.dtype=float16", "train.precision=fp16"], "model.dtype", "loses small updates"),
    (["model.dtype=bfloat16", "model.lora={}", "train.precision=fp16"], "train.precision", "Write `bf16`"),
]

MODEL = [
    (["model.name=null"], "model", "no model is given"),
    (["model.from_config={model_type: llama}", "model.tokenizer.name=gpt2"], "model.from_config", "Keep only one of"),
    (["model.name=null", "model.from_config={model_type: llama}"], "model.from_config", "its config has no tokenizer"),
    (["model.tokenizer={}"], "model.tokenizer", "Write `name` or `train`."),
    (["model.tokenizer={name: gpt2, train: {}}"], "model.tokenizer.train", "Keep only one of them"),
    (["report.trackers=[wandb, tensorbord]"], "report.trackers.1", "Did you mean `tensorboard`?"),
]

STREAM = ["data.train={path: rows.jsonl, stream: {window_rows: 8}}"]
HUB_STREAM = ["data.train={name: squad, split: 'train[:10%]', stream: {window_rows: 8}}"]
STREAMS = [
    ([*STREAM, "train.steps=null", "train.epochs=2"], "train.epochs", "Use `train.steps`"),
    (
        [*STREAM, "data.validation={hash_fraction: 0.1}", "evaluate.every_steps=5"],
        "data.validation.hash_fraction",
        "would read the whole stream `data.train` before the first step",
    ),
    ([*STREAM, "train.global_batch_size=12"], "data.train.stream.window_rows", "step of 12 needs. Write at least 12."),
    ([*STREAM, "data.batching.length_window_steps=2"], "data.train.stream.window_rows", "needs. Write at least 16."),
    (HUB_STREAM, "data.train.split", "a slice cannot be streamed. Write `train`"),
]

WEIGHTED = "data.train={mix: [{path: rows.jsonl, weight: 1}, {path: rows.jsonl, weight: 2}]}"
BATCHING = [
    (["data.batching={by: packs, tokens: 63}"], "data.batching.tokens", "does not fit into 63. Write at least 64."),
    (["data.batching.by=tokens"], "train.microbatch_size", "one position is a whole batch. Write 1."),
    (["data.batching.by=tokens", "train.microbatch_size=auto"], "train.microbatch_size", "Write 1."),
    (
        [*EVALUATION, "data.batching.by=tokens", "train.microbatch_size=1", "evaluate.microbatch_size=2"],
        "evaluate.microbatch_size",
        "Write 1.",
    ),
    (["data.train={path: rows.jsonl, mix: [{path: rows.jsonl, weight: 1}]}"], "data.train.path", "Keep only one of"),
    (["data.train={mix: [{path: rows.jsonl}]}"], "data.train.mix.0", "Write one of `weight`, `rows` or `epochs`."),
    (
        ["data.train={mix: [{path: rows.jsonl, weight: 1}, {path: rows.jsonl, epochs: 2}]}"],
        "data.train.mix.1.epochs",
        "the other sources of `data.train.mix` use `weight`",
    ),
    (
        ["data.train={mix: [{path: rows.jsonl, rows: 8}]}", "data.batching.by=packs"],
        "data.train.mix.0.rows",
        "Use `epochs` or `weight`",
    ),
]

DATA = [
    (["data.chat_template=chatlm"], "data.chat_template", "Did you mean `chatml`?"),
    (["data.chat_template=mine.jinja"], "data.chat_template", "For a file, begin with `.`, `/` or `~`:"),
    (["data.chat_template_arguments={tools: []}"], "data.chat_template_arguments.tools", "the template receives it"),
    (["data.chat_template_arguments.messages=[]"], "data.chat_template_arguments.messages", "Remove it."),
    (["data.train_on=all", "data.train_on_reasoning=false"], "data.train_on_reasoning", "with `data.train_on: all`"),
    (["task.name=pretrain", "data.train_on_reasoning=false"], "data.train_on_reasoning", "only `sft`, `distillation`"),
]

EVALUATE = [
    (["evaluate={}"], "evaluate", "there are no validation rows"),
    ([VALIDATION], "data.validation", "{}` to evaluate at the end, or remove them"),
    (["train.early_stopping={}"], "train.early_stopping", "there are no evaluations during training"),
    ([VALIDATION, "evaluate={}", "train.early_stopping={}"], "train.early_stopping", "Set `evaluate.every_steps`, or"),
    ([*EVALUATION, "train.early_stopping.metric=los"], "train.early_stopping.metric", "Did you mean `loss`?"),
    (
        [*EVALUATION, "train.early_stopping={metric: exact_match, goal: maximize}"],
        "train.early_stopping.metric",
        "Add `evaluate.generate`, which generates answers.",
    ),
    (
        [*EVALUATION, "evaluate.generate={}", "train.early_stopping.metric=exact_match"],
        "train.early_stopping.goal",
        "`minimize` stops when `exact_match` improves. Write `goal: maximize`.",
    ),
    ([*EVALUATION, "evaluate.generate.metrics=[exact_match, bleu]"], "evaluate.generate.metrics.1", "exact_match`"),
]

SAVED = "checkpoint.every_steps=10"

CHECKPOINT = [
    ([SAVED, "checkpoint.keep_every_steps=25"], "checkpoint.keep_every_steps", "Nearest that are: 20, 30."),
    (["checkpoint.keep_every_steps=20"], "checkpoint.keep_every_steps", "Set `checkpoint.every_steps`, or remove this"),
    ([SAVED, "checkpoint.keep_best={}"], "checkpoint.keep_best", "Set `evaluate.every_steps`, or remove `keep_best`"),
    ([*EVALUATION, "checkpoint.keep_best={}"], "checkpoint.keep_best", "Set `checkpoint.every_steps`, or remove"),
    ([*EVALUATION, "checkpoint={every_steps: 7, keep_best: {}}"], "checkpoint.keep_best", "evaluations every 5 steps"),
    ([SAVED, *EVALUATION, "checkpoint.keep_best.metric=perplexty"], "checkpoint.keep_best.metric", "`perplexity`?"),
    (
        [SAVED, *EVALUATION, "checkpoint.keep_best={metric: token_accuracy}"],
        "checkpoint.keep_best.goal",
        "`minimize` keeps the worst when `token_accuracy` improves. Write `goal: maximize`.",
    ),
    (["checkpoint.allow_changes=[train.learning_rat]"], "checkpoint.allow_changes.0", "mean `train.learning_rate`?"),
    (
        ["checkpoint.allow_changes=[train.steps, report.log_every_steps]"],
        "checkpoint.allow_changes.1",
        "It may differ anyway. Remove it.",
    ),
    (["checkpoint.allow_changes=[train.schedule]"], "checkpoint.allow_changes.0", "List its keys one by one:"),
    (["checkpoint.allow_changes=[train.global_batch_size]"], "checkpoint.allow_changes.0", "the position in the data"),
    (["checkpoint.allow_changes=[training data]"], "checkpoint.allow_changes.0", "data would refer to other rows:"),
    (["run.folder=s4://bucket/runs/a"], "run.folder", "the storage `s4://` is not supported"),
    (["run.folder=file:///runs/a"], "run.folder", "write a folder on this machine without `file://`:"),
    (["run.folder=s3://bucket"], "run.folder", "`s3://BUCKET/NAME`"),
    (["run.folder=s3://me:secret@bucket/runs/a"], "run.folder", "secrets do not belong in a job file"),
    (["checkpoint.resume=s3://bucket/runs/a"], "checkpoint.resume", "Copy it to a folder"),
]

EIGHT_BIT = ("model.quantization={bits: 8}",)

IDLE = [
    (["data.batching.tokens=64"], "data.batching.tokens", "have a budget"),
    (["data.batching={by: packs, padding_free: true}"], "data.batching.padding_free", "packs are never padded"),
    (["data.batching={by: packs, length_window_steps: 2}"], "data.batching.length_window_steps", "only `by: samples`"),
    (["data.train.until=all"], "data.train.until", "only `data.train.mix` with weights"),
    (["data.truncate_side=start"], "data.truncate_side", "only `over_length: truncate` truncates"),
    (["run.local_folder=runs/stage"], "run.local_folder", "only a run at a URL has one, and `run.folder` is a path"),
    (["checkpoint={resume: never, allow_changes: [train.steps]}"], "checkpoint.allow_changes", "with `resume: never`"),
    (["train.optimizer.momentum=0.9"], "train.optimizer.momentum", "only `sgd` and `muon` have momentum"),
    (["train.optimizer={name: sgd, betas: [0.9, 0.999]}"], "train.optimizer.betas", "have betas"),
    (["train.optimizer={name: adafactor, eps: 1e-6}"], "train.optimizer.eps", "have eps"),
    (["train.optimizer={name: adamw_8bit, fused: true}"], "train.optimizer.fused", "only AdamW has a fused kernel"),
    (["train.optimizer={name: sgd, state_dtype: int8}"], "train.optimizer.state_dtype", "has a choice of state dtype"),
    (["train.optimizer.stochastic_rounding=true"], "train.optimizer.stochastic_rounding", "it applies to `adamw` on"),
    (["train.schedule.decay_fraction=0.2"], "train.schedule.decay_fraction", "only `name: warmup_stable_decay`"),
    (["train.schedule={name: constant, final_fraction: 0.1}"], "train.schedule.final_fraction", "rate never decays"),
    (["train.nonfinite.max_skips=3"], "train.nonfinite.max_skips", "only `action: skip` skips steps"),
    (["data.num_workers=0", "data.persistent_workers=true"], "data.persistent_workers", "it needs `data.num_workers`"),
    (["data.num_workers=0", "data.prefetch_factor=2"], "data.prefetch_factor", "it needs `data.num_workers` above 0"),
    (["train.optimizer.lora_plus_ratio=4.0"], "train.optimizer.lora_plus_ratio", "only `model.lora` has A and B"),
    (["model.lora={}", *EIGHT_BIT, "model.quantization.kind=nf4"], "model.quantization.kind", "with 4 bits has kinds"),
    (
        ["model.lora={}", *EIGHT_BIT, "model.quantization.double=true"],
        "model.quantization.double",
        "only bitsandbytes with 4 bits quantizes its scales",
    ),
    (["export.merge=true"], "export.merge", "there are no adapters that can be merged into the base"),
    (["export.private=true"], "export.private", "it needs `export.push_to_hub`"),
    (["model.name=.", "model.revision=main"], "model.revision", "only a hub model has revisions"),
    (["model.name=.", "model.cache_folder=hub"], "model.cache_folder", "nothing is downloaded"),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, config: {attention_dropout: 0.1}}"],
        "model.config",
        "the values of a new model are in `model.from_config.values`",
    ),
    (
        [
            "model={from_config: {model_type: llama}, tokenizer: {train: {}}, "
            "rope_scaling: {rope_type: yarn, factor: 2.0}}"
        ],
        "model.rope_scaling",
        "that of a new model is `rope_scaling` in `model.from_config.values`",
    ),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, trust_remote_code: true}"],
        "model.trust_remote_code",
        "a model built from its config runs no remote code",
    ),
    (["model.lora={}", "model.freeze=[wte.*]"], "model.freeze", "adapters all of the model's own weights are frozen"),
    (["model.lora={}", "model.train_only=[wte.*]"], "model.train_only", "all of the model's own weights are frozen"),
    (["train.router_aux_loss=0.01", "report.expert_load=true"], "report.expert_load", "logs it already"),
    (["report.project=mine"], "report.project", "it needs `report.trackers`"),
    (["report.trackers=[tensorboard]", "report.run_name=first"], "report.run_name", "read it, and `report.trackers`"),
    (["report.trackers=[tensorboard]", "report.entity=team"], "report.entity", "read it, and `report.trackers` names"),
    (["report.trackers=[tensorboard]", "report.group=ablation"], "report.group", "read it, and `report.trackers`"),
    (["report.trackers=[tensorboard]", "report.tags=[lora, 8b]"], "report.tags", "read it, and `report.trackers`"),
    (["report.prometheus_address=0.0.0.0"], "report.prometheus_address", "it needs `report.prometheus`"),
]

TABLE = [*BATCH, *MODEL, *DATA, *BATCHING, *STREAMS, *EVALUATE, *CHECKPOINT, *IDLE]

RIGHT = [
    ["data.batching={by: packs, tokens: 64}"],
    ["data.batching={by: tokens, padding_free: true}", "train.microbatch_size=1"],
    ["data.batching={length_window_steps: 4, padding_free: true}"],
    [WEIGHTED.replace("]}", "], until: all}")],
    ["train.steps=null", "train.epochs=0.5"],
    ["train.schedule={name: constant, warmup_steps: 3}"],
    ["train.schedule={name: warmup_stable_decay, warmup_fraction: 0.5, decay_fraction: 0.5}"],
    ["train.optimizer={name: sgd, momentum: 0.9, fused: null}"],
    ["train.optimizer={name: adamw, fused: true, betas: [0.9, 0.95]}"],
    ["data.num_workers=1", "data.persistent_workers=true", "data.prefetch_factor=2"],
    ["data.persistent_workers=false"],
    ["data.num_workers=auto", "data.persistent_workers=true", "data.prefetch_factor=4"],
    ["data.num_workers=auto", "data.pin_memory=auto", "data.persistent_workers=auto", "data.prefetch_factor=auto"],
    ["data.prepare_workers=auto"],
    ["data.chat_template_arguments.enable_thinking=false", "data.train_on=each_assistant"],
    ["data.chat_template_arguments={reasoning_effort: low}", "data.train_on_reasoning=false"],
    ["model.dtype=bfloat16", "train.precision=bf16"],
    ["model.dtype=bfloat16", "model.lora={}"],
    ["model.dtype=float16", "model.lora={}", "train.precision=fp16"],
    ["model={from_config: {model_type: llama}, tokenizer: {train: {vocabulary_size: 300}}}"],
    ["model={from_config: {model_type: llama}, tokenizer: {name: gpt2}, cache_folder: hub}"],
    ["model.name=.", "model.trust_remote_code=true"],
    ["report.trackers=[tensorboard]", "report.project=mine"],
    ["report.trackers=[wandb, tensorboard]", "report.run_name=first", "report.entity=team", "report.tags=[lora, 8b]"],
    ["report.prometheus=9400", "report.prometheus_address=0.0.0.0", "report.profile={start: 5}"],
    ["train.nonfinite={action: skip, max_skips: 5}"],
    ["train.router_aux_loss=auto"],
    ["report.expert_load=true", "task.name=preference"],
    [*EVALUATION, "train.early_stopping.metric=perplexity"],
    [SAVED, *EVALUATION, "checkpoint.keep_best={metric: token_accuracy, goal: maximize, count: 3}"],
    [SAVED, "checkpoint.keep_every_steps=50"],
    ["checkpoint.allow_changes=[train.learning_rate, model.lora.alpha, train.steps]"],
    ["run.folder=s3://bucket/runs/a", "run.local_folder=runs/stage"],
    [
        *EVALUATION,
        "evaluate.generate.metrics=[exact_match, 'mine.scores:bleu']",
        "train.early_stopping={metric: bleu, goal: maximize}",
    ],
]


@pytest.mark.parametrize(("written", "key", "message"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_combination_that_cannot_be_meant_is_one_problem(problems, written, key, message):
    (problem,) = problems(*written)
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize("written", RIGHT, ids=" ".join)
def test_a_combination_that_can_be_meant_is_let_through(complaints, written):
    assert complaints(*written) == []


def test_every_key_that_can_be_idle_has_a_row_in_the_table():
    from_rules = {effect.key for effect in (*CONDITIONAL_KEYS, *optimizer_keys(), *tracker_keys())}
    assert from_rules == {key for _, key, _ in IDLE}
