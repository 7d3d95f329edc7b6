"""Each rule as a table: what is written over the small job, and the key that is blamed."""

import pytest

from finetune.config.rules.train import step_problems
from finetune.config.rules.unused_keys import conditional_keys
from tests.refusals import pinned

VALIDATION = "data.validation.path=rows.jsonl"
EVALUATION = (VALIDATION, "evaluate.every_steps=5")
SCHEDULE_FREE = "train.optimizer={name: schedule_free_adamw}"
IN_BACKWARD = (
    *("train.optimizer.in_backward=true", "train.max_gradient_norm=null"),
    *("train.microbatch_size=8", "train.global_batch_size=8"),
)
CONSTANT = "train.schedule={name: constant}"
PROMPT = "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}"
PREFIX = "model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4}}"
BITS = "model.quantization={}"
ROPE = "model.rope_scaling={rope_type: yarn, factor: 2.0}"

BATCH = [
    (["train.global_batch_size=30"], "train.global_batch_size"),
    (["train.global_batch_size=3"], "train.global_batch_size"),
    (["train.steps=null"], "train"),
    (["train.epochs=1.5"], "train.epochs"),
    (["train.tokens=100"], "train.tokens"),
    (["train.schedule={warmup_steps: 10}"], "train.schedule.warmup_steps"),
    (["train.schedule={warmup_steps: 2, warmup_fraction: 0.1}"], "train.schedule.warmup_fraction"),
    (["train.schedule.warmup_fraction=1.0"], "train.schedule.warmup_fraction"),
    (
        ["train.schedule={name: warmup_stable_decay, warmup_fraction: 0.5, decay_fraction: 0.6}"],
        "train.schedule.decay_fraction",
    ),
    (["model.dtype=bfloat16"], "train.precision"),
    (["model.dtype=float16", "train.precision=fp16"], "model.dtype"),
    (["model.dtype=bfloat16", "model.lora={}", "train.precision=fp16"], "train.precision"),
]

TRAIN = [
    ([SCHEDULE_FREE], "train.schedule.name"),
    ([SCHEDULE_FREE, CONSTANT, "train.average={}"], "train.average"),
    ([CONSTANT, "train.optimizer={name: schedule_free_adamw, betas: [0.0, 0.9]}"], "train.optimizer.betas"),
    (["model.freeze=['a*']", "model.train_only=['b*']"], "model.train_only"),
    (["model.freeze=['a*']", "train.unfreeze=[{patterns: ['b*', 'a*'], after_steps: 1}]"], "train.unfreeze.0.patterns"),
    (["train.unfreeze=[{patterns: ['b*'], after_steps: 100000}]"], "train.unfreeze.0.after_steps"),
    (["train.average={after_steps: 100000}"], "train.average.after_steps"),
    (["train.optimizer.rates={'*': 0.0}"], "train.optimizer.rates.*"),
    (["train.optimizer.fused=true", "train.optimizer.name=sgd"], "train.optimizer.fused"),
    (["train.optimizer={state_dtype: int8, fused: true}"], "train.optimizer.fused"),
    (
        ["train.optimizer.stochastic_rounding=true", "model.dtype=bfloat16", "model.lora={}"],
        "train.optimizer.stochastic_rounding",
    ),
    ([*IN_BACKWARD, "train.max_gradient_norm=1.0"], "train.optimizer.in_backward"),
    ([*IN_BACKWARD, "train.microbatch_size=2"], "train.optimizer.in_backward"),
    ([*IN_BACKWARD, "train.microbatch_size=auto"], "train.optimizer.in_backward"),
    (["train.microbatch_size=most"], "train.microbatch_size"),
    (["train.try_longest_batch=sometimes"], "train.try_longest_batch"),
    ([*IN_BACKWARD, "train.nonfinite.action=skip"], "train.nonfinite.action"),
    ([*IN_BACKWARD, "train.precision=fp16"], "train.optimizer.in_backward"),
    (["train.precision=fp8", "model.quantization={}", "model.lora={}"], "train.precision"),
    (["train.precision=fp8", "model.dtype=float16", "model.lora={}"], "train.precision"),
    (["model.gradient_checkpointing=1"], "model.gradient_checkpointing"),
]

MODEL = [
    (["model.name=null"], "model"),
    (["model.from_config={model_type: llama}", "model.tokenizer.name=gpt2"], "model.from_config"),
    (["model.name=null", "model.from_config={model_type: llama}"], "model.from_config"),
    (["model.tokenizer={}"], "model.tokenizer"),
    (["model.tokenizer={name: gpt2, train: {}}"], "model.tokenizer.train"),
    (["report.trackers=[wandb, tensorbord]"], "report.trackers.1"),
    ([PROMPT, "data.batching={by: packs, tokens: 64}"], "data.batching.by"),
    ([PREFIX, "data.batching={padding_free: true}"], "data.batching.padding_free"),
    ([PREFIX, "model.gradient_checkpointing=true"], "model.gradient_checkpointing"),
    (["model.lora={init: pissa}", "model.dtype=bfloat16"], "model.lora.init"),
    (["model.lora={init: olora}", BITS], "model.lora.init"),
    (["model.lora={init: pissa, dora: true}"], "model.lora.dora"),
    (["model.lora={init: loftq}"], "model.lora.init"),
    (["model.lora={init: loftq, dora: true}", BITS], "model.lora.dora"),
    ([BITS], "model.quantization"),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, lora: {}, quantization: {}}"],
        "model.quantization",
    ),
    (["model.peft={type: ia3}", "model.quantization={method: torchao, bits: 8}"], "model.peft"),
    (["model.lora={}", "model.quantization={method: torchao}"], "model.quantization.bits"),
    (["model.new_tokens={}"], "model.new_tokens"),
    (["model.new_tokens={tokens: [a]}", "model.peft={type: oft}"], "model.new_tokens"),
    (
        [ROPE, "model.config={max_position_embeddings: 64}"],
        "model.config.max_position_embeddings",
    ),
    (
        [
            ROPE,
            "model.config={text_config: {rope_parameters: {rope_type: linear, factor: 2.0}}}",
        ],
        "model.config.text_config.rope_parameters",
    ),
    (["model.lora={}", "model.peft={type: oft}"], "model.peft"),
    (["model.peft={type: lora}"], "model.peft.type"),
    (["model.peft={type: adalora}"], "model.peft.type"),
    (["model.peft={type: cpt}"], "model.peft.type"),
    (["model.peft={type: vera}", "export.merge=true"], "export.merge"),
    (["model.peft={type: prompt_tuning}"], "model.peft.values"),
    (
        ["model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4, prefix_projection: true}}"],
        "model.peft.values.prefix_projection",
    ),
    (["model.peft={type: new_type}", "export.merge=true"], "export.merge"),
    (["model.peft={type: loha, values: {task_type: SEQ_CLS}}"], "model.peft.values.task_type"),
]

STREAM = ["data.train={path: rows.jsonl, stream: {window_rows: 8}}"]
HUB_STREAM = ["data.train={name: squad, split: 'train[:10%]', stream: {window_rows: 8}}"]
STREAMS = [
    ([*STREAM, "train.steps=null", "train.epochs=2"], "train.epochs"),
    ([*STREAM, "data.validation={hash_fraction: 0.1}", "evaluate.every_steps=5"], "data.validation.hash_fraction"),
    ([*STREAM, "train.global_batch_size=12"], "data.train.stream.window_rows"),
    ([*STREAM, "data.batching.length_window_steps=2"], "data.train.stream.window_rows"),
    (HUB_STREAM, "data.train.split"),
]

WEIGHTED = "data.train={mix: [{path: rows.jsonl, weight: 1}, {path: rows.jsonl, weight: 2}]}"
BATCHING = [
    (["data.batching={by: packs, tokens: 63}"], "data.batching.tokens"),
    (["data.batching.by=tokens"], "train.microbatch_size"),
    (["data.batching.by=tokens", "train.microbatch_size=auto"], "train.microbatch_size"),
    (
        [*EVALUATION, "data.batching.by=tokens", "train.microbatch_size=1", "evaluate.microbatch_size=2"],
        "evaluate.microbatch_size",
    ),
    (["data.train={path: rows.jsonl, mix: [{path: rows.jsonl, weight: 1}]}"], "data.train.path"),
    (["data.train={mix: [{path: rows.jsonl}]}"], "data.train.mix.0"),
    (["data.train={mix: [{path: rows.jsonl, weight: 1}, {path: rows.jsonl, epochs: 2}]}"], "data.train.mix.1.epochs"),
    (["data.train={mix: [{path: rows.jsonl, rows: 8}]}", "data.batching.by=packs"], "data.train.mix.0.rows"),
]

DATA = [
    (["data.chat_template=chatlm"], "data.chat_template"),
    (["data.chat_template=mine.jinja"], "data.chat_template"),
    (["data.chat_template_arguments={tools: []}"], "data.chat_template_arguments.tools"),
    (["data.chat_template_arguments.messages=[]"], "data.chat_template_arguments.messages"),
    (["data.train_on=all", "data.train_on_reasoning=false"], "data.train_on_reasoning"),
    (["task.name=pretrain", "data.train_on_reasoning=false"], "data.train_on_reasoning"),
]

EVALUATE = [
    (["evaluate={}"], "evaluate"),
    ([VALIDATION], "data.validation"),
    (["train.early_stopping={}"], "train.early_stopping"),
    ([VALIDATION, "evaluate={}", "train.early_stopping={}"], "train.early_stopping"),
    ([*EVALUATION, "train.early_stopping.metric=los"], "train.early_stopping.metric"),
    ([*EVALUATION, "train.early_stopping={metric: exact_match, goal: maximize}"], "train.early_stopping.metric"),
    ([*EVALUATION, "evaluate.generate={}", "train.early_stopping.metric=exact_match"], "train.early_stopping.goal"),
    ([*EVALUATION, "evaluate.generate.metrics=[exact_match, bleu]"], "evaluate.generate.metrics.1"),
]

SAVED = "checkpoint.every_steps=10"

CHECKPOINT = [
    ([SAVED, "checkpoint.keep_every_steps=25"], "checkpoint.keep_every_steps"),
    (["checkpoint.keep_every_steps=20"], "checkpoint.keep_every_steps"),
    ([SAVED, "checkpoint.keep_best={}"], "checkpoint.keep_best"),
    ([*EVALUATION, "checkpoint.keep_best={}"], "checkpoint.keep_best"),
    ([*EVALUATION, "checkpoint={every_steps: 7, keep_best: {}}"], "checkpoint.keep_best"),
    ([SAVED, *EVALUATION, "checkpoint.keep_best.metric=perplexty"], "checkpoint.keep_best.metric"),
    ([SAVED, *EVALUATION, "checkpoint.keep_best={metric: token_accuracy}"], "checkpoint.keep_best.goal"),
    (["checkpoint.allow_changes=[train.learning_rat]"], "checkpoint.allow_changes.0"),
    (["checkpoint.allow_changes=[train.steps, report.log_every_steps]"], "checkpoint.allow_changes.1"),
    (["checkpoint.allow_changes=[train.schedule]"], "checkpoint.allow_changes.0"),
    (["checkpoint.allow_changes=[train.global_batch_size]"], "checkpoint.allow_changes.0"),
    (["checkpoint.allow_changes=[training data]"], "checkpoint.allow_changes.0"),
    (["run.folder=s4://bucket/runs/a"], "run.folder"),
    (["run.folder=file:///runs/a"], "run.folder"),
    (["run.folder=s3://bucket"], "run.folder"),
    (["run.folder=s3://me:secret@bucket/runs/a"], "run.folder"),
    (["checkpoint.resume=s3://bucket/runs/a"], "checkpoint.resume"),
]

EIGHT_BIT = ("model.quantization={bits: 8}",)

IDLE = [
    (["data.batching.tokens=64"], "data.batching.tokens"),
    (["data.batching={by: packs, padding_free: true}"], "data.batching.padding_free"),
    (["data.batching={by: packs, length_window_steps: 2}"], "data.batching.length_window_steps"),
    (["data.train.until=all"], "data.train.until"),
    (["data.truncate_side=start"], "data.truncate_side"),
    (["run.local_folder=runs/stage"], "run.local_folder"),
    (["checkpoint={resume: never, allow_changes: [train.steps]}"], "checkpoint.allow_changes"),
    (["train.optimizer.momentum=0.9"], "train.optimizer.momentum"),
    (["train.optimizer={name: sgd, betas: [0.9, 0.999]}"], "train.optimizer.betas"),
    (["train.optimizer={name: adafactor, eps: 1e-6}"], "train.optimizer.eps"),
    (["train.optimizer={name: adamw_8bit, fused: true}"], "train.optimizer.fused"),
    (["train.optimizer={name: sgd, state_dtype: int8}"], "train.optimizer.state_dtype"),
    (["train.optimizer.stochastic_rounding=true"], "train.optimizer.stochastic_rounding"),
    (["train.schedule.decay_fraction=0.2"], "train.schedule.decay_fraction"),
    (["train.schedule={name: constant, final_fraction: 0.1}"], "train.schedule.final_fraction"),
    (["train.nonfinite.max_skips=3"], "train.nonfinite.max_skips"),
    (["train.fp8={}"], "train.fp8"),
    (["data.num_workers=0", "data.persistent_workers=true"], "data.persistent_workers"),
    (["data.num_workers=0", "data.prefetch_factor=2"], "data.prefetch_factor"),
    (["train.optimizer.lora_plus_ratio=4.0"], "train.optimizer.lora_plus_ratio"),
    (["model.lora={}", *EIGHT_BIT, "model.quantization.kind=nf4"], "model.quantization.kind"),
    (["model.lora={}", *EIGHT_BIT, "model.quantization.double=true"], "model.quantization.double"),
    (["export.merge=true"], "export.merge"),
    (["export.private=true"], "export.private"),
    (["model.name=.", "model.revision=main"], "model.revision"),
    (["model.name=.", "model.cache_folder=hub"], "model.cache_folder"),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, config: {attention_dropout: 0.1}}"],
        "model.config",
    ),
    (
        [
            "model={from_config: {model_type: llama}, tokenizer: {train: {}}, "
            "rope_scaling: {rope_type: yarn, factor: 2.0}}"
        ],
        "model.rope_scaling",
    ),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, trust_remote_code: true}"],
        "model.trust_remote_code",
    ),
    (["model.lora={}", "model.freeze=[wte.*]"], "model.freeze"),
    (["model.lora={}", "model.train_only=[wte.*]"], "model.train_only"),
    (["train.router_aux_loss=0.01", "report.expert_load=true"], "report.expert_load"),
    (["report.project=mine"], "report.project"),
    (["report.trackers=[tensorboard]", "report.run_name=first"], "report.run_name"),
    (["report.trackers=[tensorboard]", "report.entity=team"], "report.entity"),
    (["report.trackers=[tensorboard]", "report.group=ablation"], "report.group"),
    (["report.trackers=[tensorboard]", "report.tags=[lora, 8b]"], "report.tags"),
    (["report.prometheus_address=0.0.0.0"], "report.prometheus_address"),
]

TABLE = [*BATCH, *TRAIN, *MODEL, *DATA, *BATCHING, *STREAMS, *EVALUATE, *CHECKPOINT, *IDLE]

RIGHT = [
    [SCHEDULE_FREE, CONSTANT],
    ["train.optimizer={name: muon, momentum: 0.9, betas: [0.9, 0.95]}", "train.average={}"],
    [*IN_BACKWARD],
    ["train.optimizer={stochastic_rounding: true, state_dtype: int8}", "model.dtype=bfloat16", "train.precision=bf16"],
    ["model.gradient_checkpointing=selective"],
    ["train.precision=fp8", "train.fp8={recipe: rowwise}", "model.dtype=bfloat16", "model.lora={}"],
    ["train.unfreeze=[{patterns: ['b*'], after_steps: 1}]", "train.embedding_noise=5.0"],
    [PROMPT],
    [PREFIX],
    ["model.lora={init: pissa}"],
    ["model.lora={init: loftq}", BITS],
    ["model.new_tokens={special: ['<|tool|>'], init: pieces}", "model.lora={}"],
    ["model.adapter=./first"],
    [ROPE, "model.config={attention_dropout: 0.1, rope_theta: 1e6}"],
    ["model.peft={type: oft}", "model.dtype=bfloat16"],
    ["model.peft={type: loha, values: {r: 4}}"],
    ["model.peft={type: lokr}", "export.merge=true"],
    ["model.peft={type: IA3}"],
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


@pytest.mark.parametrize(("written", "key"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_combination_that_cannot_be_meant_is_one_problem(problems, written, key):
    (problem,) = problems(*written)
    assert problem.key == key
    pinned(problem)


@pytest.mark.parametrize("written", RIGHT, ids=" ".join)
def test_a_combination_that_can_be_meant_is_let_through(complaints, written):
    assert complaints(*written) == []


def test_every_key_that_can_be_idle_has_a_row_in_the_table():
    from_rules = {effect.key for effect in conditional_keys()}
    assert from_rules == {key for _, key in IDLE}


def test_a_task_whose_head_picks_a_position_has_nothing_before_its_text(problems):
    written = ("task.name=token_classification", "data.train.format=tagged", PROMPT)
    assert "model.peft.type" in {problem.key for problem in problems(*written)}


WSD = "name: warmup_stable_decay, decay_fraction: 0.5"
UNFREEZE = "train.unfreeze=[{patterns: ['a*'], after_steps: 2}, {patterns: ['b*'], after_steps: %d}]"
STEPS = [  # what is written, its key, the fewest steps of a run that it fits
    ("train.schedule={warmup_steps: 100}", "train.schedule.warmup_steps", 101),
    (f"train.schedule={{warmup_steps: 5, {WSD}}}", "train.schedule.warmup_steps", 9),
    ("train.average={after_steps: 500}", "train.average.after_steps", 501),
    (UNFREEZE % 500, "train.unfreeze.1.after_steps", 501),
    ("report.profile={start: 7}", "report.profile.start", 7),
    ("train.stop_after_steps=500", None, 1),  # an upper limit: a shorter run keeps it, and is due at its last step
    ("checkpoint={every_steps: 500, keep_every_steps: 1000}", None, 1),
    ("report.log_every_steps=500", None, 1),
    ("train.schedule={warmup_steps: 0}", None, 1),
    ("train.average={after_steps: 0}", None, 1),
]


@pytest.mark.parametrize(("written", "key", "fewest"), STEPS, ids=[row[0] for row in STEPS])
@pytest.mark.parametrize("budget", ["steps", "epochs", "tokens"])
def test_a_key_that_counts_steps_fits_the_run_under_every_budget(load, problems, budget, written, key, fewest):
    """A budget in epochs or tokens has no problem before its number of steps is known, and then the same one."""
    for num_steps in {max(1, fewest - 1), fewest}:
        if budget == "steps":
            found = problems(written, f"train.steps={num_steps}")
        else:
            config = load(written, "train.steps=null", f"train.{budget}=100").config
            found = list(step_problems(config, num_steps=num_steps))
        keys = [problem.key for problem in found if problem.key != "train.unfreeze.0.after_steps"]
        assert keys == ([key] if num_steps < fewest else [])
        assert all(f"the run has {num_steps} steps" in problem.message for problem in found)
