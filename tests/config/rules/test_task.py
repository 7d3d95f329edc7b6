"""What each task needs, and keys that only some tasks read."""

import pytest

from finetune.config.rules.unused_keys import conditional_task_keys
from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.registry.tasks import TASKS
from tests.refusals import pinned

EVALUATION = ("data.validation={path: rows.jsonl}",)
IMAGES = ("task.name=image_classification", "data.max_length=null", "model.tokenizer=null")

COSENT = ["task.name=embedding", "task.embedding.loss=cosent"]
IDLE = [
    (["task.classification.kind=multi_label"], "task.classification.kind"),
    (["task.name=token_classification", "task.classification.kind=regression"], "task.classification.kind"),
    (["task.classification.labels=[a, b]"], "task.classification.labels"),
    (["task.classification.class_weights=balanced"], "task.classification.class_weights"),
    (["task.preference.loss=ipo"], "task.preference.loss"),
    (["task.preference.beta=0.2"], "task.preference.beta"),
    (["task.preference.sft_weight=0.2"], "task.preference.sft_weight"),
    (["task.name=preference", "task.preference.target_margin=1.0"], "task.preference.target_margin"),
    (["task.name=preference", "task.preference.desirable_weight=2.0"], "task.preference.desirable_weight"),
    (["task.name=preference", "task.preference.undesirable_weight=2.0"], "task.preference.undesirable_weight"),
    (["task.name=preference", "task.preference={loss: ipo, label_smoothing: 0.1}"], "task.preference.label_smoothing"),
    (["task.reward.use_margin=true"], "task.reward.use_margin"),
    (["task.reward.centering=0.1"], "task.reward.centering"),
    *(
        (
            [
                "task.name=distillation",
                f"task.distillation={{teacher: ./teacher, cross_entropy_weight: 1, {key}: {value}}}",
            ],
            f"task.distillation.{key}",
        )
        for key, value in (
            ("temperature", 2.0),
            ("divergence", "jsd"),
            ("top_k", 4),
            ("cache", "true, top_k: 4"),
        )
    ),
    (["task.name=preference", "task.preference={loss: kto, sft_weight: 0.0}"], "task.preference.sft_weight"),
    (["task.distillation={teacher: ./teacher}"], "task.distillation"),
    (["task.name=distillation", "task.distillation={teacher: ./teacher, jsd_beta: 0.3}"], "task.distillation.jsd_beta"),
    (["task.seq2seq.source_prefix=x"], "task.seq2seq.source_prefix"),
    (["task.seq2seq.max_target_length=9"], "task.seq2seq.max_target_length"),
    (["task.masked_lm.fraction=0.3"], "task.masked_lm.fraction"),
    (["task.masked_lm.random_fraction=0.3"], "task.masked_lm.random_fraction"),
    (["task.masked_lm.kept_fraction=0.3"], "task.masked_lm.kept_fraction"),
    (["task.masked_lm.whole_words=true"], "task.masked_lm.whole_words"),
    (["task.name=reward", "task.label_smoothing=0.1"], "task.label_smoothing"),
    (["task.name=reward", "task.z_loss=0.1"], "task.z_loss"),
    (["task.name=reward", "train.loss_kernel=plain"], "train.loss_kernel"),
    (["data.images.size=32"], "data.images.size"),
    (["data.images.crop_scale=[0.1, 1.0]"], "data.images.crop_scale"),
    (["data.images.crop_padding=4"], "data.images.crop_padding"),
    (["data.images.flip=true"], "data.images.flip"),
    (["data.images.mixup=0.2"], "data.images.mixup"),
    (["data.images.cutmix=0.2"], "data.images.cutmix"),
    (["data.images.min_pixels=784"], "data.images.min_pixels"),
    ([*IMAGES, "data.images.max_pixels=784"], "data.images.max_pixels"),
    (["model.image_processor={size: 8}"], "model.image_processor"),
    ([*IMAGES, "data.max_length=4"], "data.max_length"),
    ([*IMAGES, "data.over_length=drop"], "data.over_length"),
    ([*IMAGES, "data.no_target=drop"], "data.no_target"),
    ([*IMAGES, "data.batching={length_window_steps: 1}"], "data.batching.length_window_steps"),
    ([*IMAGES, "data.audit.max_truncated_rows=0.1"], "data.audit.max_truncated_rows"),
    ([*IMAGES, "data.audit.max_dropped_rows=0.1"], "data.audit.max_dropped_rows"),
    ([*IMAGES, "data.audit.max_lost_targets=0.1"], "data.audit.max_lost_targets"),
    ([*IMAGES, "data.audit.max_unknown_tokens=0.1"], "data.audit.max_unknown_tokens"),
    ([*IMAGES, "model.tokenizer={name: x}"], "model.tokenizer"),
    ([*IMAGES, "model.new_tokens={tokens: [x]}"], "model.new_tokens"),
    ([*IMAGES, "train.embedding_noise=5.0"], "train.embedding_noise"),
    ([*IMAGES, "train.router_aux_loss=0.01"], "train.router_aux_loss"),
    ([*IMAGES, "report.expert_load=true"], "report.expert_load"),
    ([*IMAGES, "data.allow_special_tokens=true"], "data.allow_special_tokens"),
    (["task.name=pretrain", "data.chat_template=chatml"], "data.chat_template"),
    (["task.name=pretrain", "data.chat_template_arguments={enable_thinking: false}"], "data.chat_template_arguments"),
    (["task.name=pretrain", "data.system_prompt=Hi."], "data.system_prompt"),
    (["task.name=pretrain", "data.train_on=all"], "data.train_on"),
    (["task.name=pretrain", *EVALUATION, "evaluate.generate={}"], "evaluate.generate"),
    (["data.train_on=all", *EVALUATION, "evaluate.generate={}"], "evaluate.generate"),
    (
        ["task.name=vision_language_sft", *EVALUATION, "evaluate.generate={batch_size: 4}"],
        "evaluate.generate.batch_size",
    ),
    *(
        ([f"task.embedding.{name}={value}"], f"task.embedding.{name}")
        for name, value in (
            *(("loss", "cosent"), ("matryoshka_dims", "[8]"), ("pooling", "cls"), ("normalize", "true")),
            *(("prompts.query", "q"), ("prompts.passage", "p")),
        )
    ),
    ([*COSENT, "task.embedding.symmetric=true"], "task.embedding.symmetric"),
    (["task.name=embedding", "task.embedding={loss: cosine_mse, temperature: 0.1}"], "task.embedding.temperature"),
    (["task.reranking.loss=bce"], "task.reranking.loss"),
]


def test_every_key_that_can_be_idle_has_a_row_in_the_table():
    elsewhere = {"data.truncate_side", "task.loss"}  # their rows are in test_rules.py and tests/plugins
    assert {effect.key for effect in conditional_task_keys()} - elsewhere == {key for _, key in IDLE}


PREFERENCE = "task.name=preference"
PAIRS = "data.train={path: rows.jsonl, format: preference}"
JUDGED = "data.train={path: rows.jsonl, format: judged}"
STREAM = "data.train={path: rows.jsonl, format: preference, stream: {}}"
ROBUST = "task.preference={loss: robust, label_smoothing: 0.1}"

WRONG = [
    ([PREFERENCE, PAIRS, "task.preference.loss=robust"], "task.preference.label_smoothing"),
    ([PREFERENCE, JUDGED], "data.train.format"),
    ([PREFERENCE, STREAM], "data.train.stream"),
    ([PREFERENCE, PAIRS, "data.over_length=split"], "data.over_length"),
    ([PREFERENCE, PAIRS, "data.batching={by: packs}"], "data.batching.by"),
    ([*COSENT, "data.train.format=pairs"], "data.train.format"),
    (["task.name=embedding", "data.train.format=scored_pairs"], "data.train.format"),
    (["task.name=reranking", "data.train.format=scored_pairs"], "data.train.format"),
    (["task.name=embedding", "data.train.format=text"], "data.train.format"),
    (["task.name=embedding", "task.embedding.matryoshka_dims=[8, 8]"], "task.embedding.matryoshka_dims"),
    ([*COSENT, "task.embedding.normalize=false"], "task.embedding.normalize"),
    (["task.name=embedding", "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 2}}"], "model.peft.type"),
    (["task.name=embedding", "train.global_batch_size=1", "train.microbatch_size=1"], "train.global_batch_size"),
    (["task.name=embedding", "data.over_length=split"], "data.over_length"),
    (["task.name=reranking", "data.batching={by: packs}"], "data.batching.by"),
    (["train.router_aux_loss=auto", "model.compile=full"], "train.router_aux_loss"),
    (["report.expert_load=true", "model.compile=regional"], "report.expert_load"),
    (["task.z_loss=0.1", "train.loss_kernel=liger"], "train.loss_kernel"),
    (["task.name=distillation"], "task.distillation"),
    (["task.name=distillation", "task.distillation={teacher: ./teacher, cache: true}"], "task.distillation.cache"),
    (
        [
            "task.name=distillation",
            "task.distillation={teacher: ./teacher, top_k: 8, cache: true}",
            "data.train.stream={}",
        ],
        "data.train.stream",
    ),
    (["task.name=seq2seq", "data.over_length=split"], "data.over_length"),
    (["task.name=seq2seq", "data.max_length=64", "data.batching={by: tokens, tokens: 100}"], "data.batching.tokens"),
    (
        ["task.name=masked_lm", "task.masked_lm={random_fraction: 0.6, kept_fraction: 0.6}"],
        "task.masked_lm.random_fraction",
    ),
    (["task.name=text_classification", "task.classification.labels=[a, a]"], "task.classification.labels"),
    (
        ["task.name=text_classification", "task.classification={labels: [a, b], class_weights: [1.0]}"],
        "task.classification.class_weights",
    ),
    (
        ["task.name=text_classification", "task.classification={labels: [a, b], class_weights: [0, 0.0]}"],
        "task.classification.class_weights",
    ),
    (
        ["task.name=text_classification", "task.classification={class_weights: [1.0]}"],
        "task.classification.class_weights",
    ),
    (["task.name=text_classification", "task.classification.labels=[a]"], "task.classification.labels"),
    (["task.name=text_classification", "data.over_length=split"], "data.over_length"),
    (["task.name=seq2seq", "data.batching={padding_free: true}"], "data.batching.padding_free"),
    ([*IMAGES, "data.images={crop_scale: [0.1, 1.0], crop_padding: 4}"], "data.images.crop_padding"),
    ([*IMAGES, "data.images.crop_scale=[1.0, 0.1]"], "data.images.crop_scale"),
    (["task.name=vision_language_sft", "data.images={min_pixels: 900, max_pixels: 800}"], "data.images.min_pixels"),
    ([*IMAGES, "data.images.size=32", "model.image_processor={size: 64}"], "data.images.size"),
    ([*IMAGES, "data.images.cutmix=1.0", "data.train.stream={}"], "data.images.cutmix"),
    ([*IMAGES, "model.batch_norm=3", "train.microbatch_size=4", "train.global_batch_size=8"], "model.batch_norm"),
    ([*IMAGES, "model.batch_norm=4", "model.lora={}"], "model.batch_norm"),
    (["task.name=vision_language_sft", "data.over_length=truncate"], "data.over_length"),
    (["task.name=vision_language_sft", "data.over_length=split"], "data.over_length"),
    (["task.name=vision_language_sft", "model.tokenizer={train: {}}"], "model.tokenizer.train"),
    (["model.compile=full", "train.embedding_noise=5.0"], "model.compile"),
    ([*IMAGES, "model.compile=regional", "model.batch_norm=4"], "model.compile"),
]


@pytest.mark.parametrize(("written", "key"), IDLE + WRONG, ids=[" ".join(row[0]) for row in IDLE + WRONG])
def test_a_key_that_does_not_fit_the_task_is_reported(problems, written, key):
    found = [problem for problem in problems(*written) if problem.key == key]
    assert found
    for problem in found:
        pinned(problem)


@pytest.mark.parametrize("task", [task for task in TASKS if task.has_tokens], ids=lambda task: task.name)
def test_every_way_out_for_long_rows_that_a_task_names_is_accepted_and_no_other(problems, task):
    assert "drop" in task.over_length
    for value in ("truncate", "split", "drop"):
        named = [
            problem.message
            for problem in problems(f"task.name={task.name}", f"data.over_length={value}")
            if problem.key == "data.over_length"
        ]
        assert (named == []) == (value in task.over_length), value
        assert all(f"`{other}`" in message for message in named for other in task.over_length)


@pytest.mark.parametrize(
    "overrides", [[PAIRS], [PAIRS, ROBUST], [JUDGED, "task.preference.loss=kto"], [STREAM, "task.preference.loss=orpo"]]
)
def test_compatible_preference_settings_are_accepted(problems, overrides):
    assert problems(PREFERENCE, *overrides) == []


@pytest.mark.parametrize("loss", [entry.name for entry in PREFERENCE_LOSSES])
def test_every_key_of_preferences_is_read_by_the_losses_that_accept_it(problems, loss):
    entry = PREFERENCE_LOSSES[loss]
    values = {"label_smoothing": 0.1, "target_margin": 1.0, "sft_weight": 0.5, "desirable_weight": 2.0}
    refused = set()
    for key, value in values.items():
        found = problems("task.name=preference", f"task.preference={{loss: {loss}, {key}: {value}}}")
        refused |= {key} & {problem.key.removeprefix("task.preference.") for problem in found}
    assert refused == values.keys() - entry.reads
    assert ("sft_weight" in entry.reads) == (loss != "kto")
