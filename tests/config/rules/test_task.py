"""What each task needs, and keys that only some tasks read."""

import pytest

from finetune.config.rules.unused_keys import conditional_task_keys
from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.registry.tasks import TASKS

EVALUATION = ("data.validation={path: rows.jsonl}",)
IMAGES = ("task.name=image_classification", "data.max_length=null", "model.tokenizer=null")

COSENT = ["task.name=embedding", "task.embedding.loss=cosent"]
IDLE = [
    (["task.classification.kind=multi_label"], "task.classification.kind", "`task.name: text_classification`"),
    (
        ["task.name=token_classification", "task.classification.kind=regression"],
        "task.classification.kind",
        "one class",
    ),
    (["task.classification.labels=[a, b]"], "task.classification.labels", "`task.name: image_classification` read it"),
    (["task.classification.class_weights=balanced"], "task.classification.class_weights", "read it"),
    (["task.preference.loss=ipo"], "task.preference.loss", "only `task.name: preference` reads it"),
    (["task.preference.beta=0.2"], "task.preference.beta", "only `task.name: preference` reads it"),
    (["task.preference.sft_weight=0.2"], "task.preference.sft_weight", "only `task.name: preference` reads it"),
    (["task.name=preference", "task.preference.target_margin=1.0"], "task.preference.target_margin", "`loss: simpo`"),
    (["task.name=preference", "task.preference.desirable_weight=2.0"], "task.preference.desirable_weight", "kto"),
    (["task.name=preference", "task.preference.undesirable_weight=2.0"], "task.preference.undesirable_weight", "kto"),
    (
        ["task.name=preference", "task.preference={loss: ipo, label_smoothing: 0.1}"],
        "task.preference.label_smoothing",
        "only `loss: sigmoid` and `loss: robust` and `loss: cpo` read it",
    ),
    (["task.reward.use_margin=true"], "task.reward.use_margin", "only `task.name: reward` reads it"),
    (["task.reward.centering=0.1"], "task.reward.centering", "only `task.name: reward` reads it"),
    *(
        (
            [
                "task.name=distillation",
                f"task.distillation={{teacher: ./teacher, cross_entropy_weight: 1, {key}: {value}}}",
            ],
            f"task.distillation.{key}",
            "with `cross_entropy_weight: 1` the task is `sft`",
        )
        for key, value in (
            ("temperature", 2.0),
            ("divergence", "jsd"),
            ("top_k", 4),
            ("cache", "true, top_k: 4"),
        )
    ),
    (
        ["task.name=preference", "task.preference={loss: kto, sft_weight: 0.0}"],
        "task.preference.sft_weight",
        "`loss: kto` does not read it",
    ),
    (["task.distillation={teacher: ./teacher}"], "task.distillation", "only `task.name: distillation` reads it"),
    (
        ["task.name=distillation", "task.distillation={teacher: ./teacher, jsd_beta: 0.3}"],
        "task.distillation.jsd_beta",
        "only `divergence: jsd` has a mixture",
    ),
    (["task.seq2seq.source_prefix=x"], "task.seq2seq.source_prefix", "only `task.name: seq2seq` reads it"),
    (["task.seq2seq.max_target_length=9"], "task.seq2seq.max_target_length", "only `task.name: seq2seq` reads it"),
    (["task.masked_lm.fraction=0.3"], "task.masked_lm.fraction", "only `task.name: masked_lm` reads it"),
    (["task.masked_lm.random_fraction=0.3"], "task.masked_lm.random_fraction", "only `task.name: masked_lm` reads it"),
    (["task.masked_lm.kept_fraction=0.3"], "task.masked_lm.kept_fraction", "only `task.name: masked_lm` reads it"),
    (["task.masked_lm.whole_words=true"], "task.masked_lm.whole_words", "only `task.name: masked_lm` reads it"),
    (["task.name=reward", "task.label_smoothing=0.1"], "task.label_smoothing", "only to a cross-entropy"),
    (["task.name=reward", "task.z_loss=0.1"], "task.z_loss", "only to a cross-entropy over tokens"),
    (["task.name=reward", "train.loss_kernel=plain"], "train.loss_kernel", "only a cross-entropy over tokens"),
    (["data.images.size=32"], "data.images.size", "only `task.name: image_classification` reads it"),
    (["data.images.crop_scale=[0.1, 1.0]"], "data.images.crop_scale", "reads it"),
    (["data.images.crop_padding=4"], "data.images.crop_padding", "reads it"),
    (["data.images.flip=true"], "data.images.flip", "reads it"),
    (["data.images.mixup=0.2"], "data.images.mixup", "reads it"),
    (["data.images.cutmix=0.2"], "data.images.cutmix", "reads it"),
    (["data.images.min_pixels=784"], "data.images.min_pixels", "only `task.name: vision_language_sft` reads it"),
    ([*IMAGES, "data.images.max_pixels=784"], "data.images.max_pixels", "only `task.name: vision_language_sft`"),
    (["model.image_processor={size: 8}"], "model.image_processor", "only `task.name: image_classification` reads it"),
    ([*IMAGES, "data.max_length=4"], "data.max_length", "images have no tokens"),
    ([*IMAGES, "data.over_length=drop"], "data.over_length", "images have no tokens"),
    ([*IMAGES, "data.no_target=drop"], "data.no_target", "every image is one target"),
    ([*IMAGES, "data.batching={length_window_steps: 1}"], "data.batching.length_window_steps", "every image"),
    ([*IMAGES, "data.audit.max_truncated_rows=0.1"], "data.audit.max_truncated_rows", "every image"),
    ([*IMAGES, "data.audit.max_dropped_rows=0.1"], "data.audit.max_dropped_rows", "every image"),
    ([*IMAGES, "data.audit.max_lost_targets=0.1"], "data.audit.max_lost_targets", "every image"),
    ([*IMAGES, "data.audit.max_unknown_tokens=0.1"], "data.audit.max_unknown_tokens", "every image"),
    ([*IMAGES, "model.tokenizer={name: x}"], "model.tokenizer", "images have no tokens"),
    ([*IMAGES, "model.new_tokens={tokens: [x]}"], "model.new_tokens", "images have no tokens"),
    ([*IMAGES, "train.embedding_noise=5.0"], "train.embedding_noise", "only `task.name: sft` and"),
    ([*IMAGES, "train.router_aux_loss=0.01"], "train.router_aux_loss", "only `task.name: sft` and"),
    ([*IMAGES, "report.expert_load=true"], "report.expert_load", "only `task.name: sft` and"),
    ([*IMAGES, "data.allow_special_tokens=true"], "data.allow_special_tokens", "images have no tokens"),
    (["task.name=pretrain", "data.chat_template=chatml"], "data.chat_template", "reads text without turns"),
    (
        ["task.name=pretrain", "data.chat_template_arguments={enable_thinking: false}"],
        "data.chat_template_arguments",
        "reads text without turns",
    ),
    (["task.name=pretrain", "data.system_prompt=Hi."], "data.system_prompt", "reads text without turns"),
    (["task.name=pretrain", "data.train_on=all"], "data.train_on", "the task decides"),
    (["task.name=pretrain", *EVALUATION, "evaluate.generate={}"], "evaluate.generate", "no prompts to generate from"),
    (["data.train_on=all", *EVALUATION, "evaluate.generate={}"], "evaluate.generate", "no prompts to generate from"),
    (
        ["task.name=vision_language_sft", *EVALUATION, "evaluate.generate={batch_size: 4}"],
        "evaluate.generate.batch_size",
        "generated one by one",
    ),
    *(
        ([f"task.embedding.{name}={value}"], f"task.embedding.{name}", "only `task.name: embedding` reads it")
        for name, value in (
            *(("loss", "cosent"), ("matryoshka_dims", "[8]"), ("pooling", "cls"), ("normalize", "true")),
            *(("prompts.query", "q"), ("prompts.passage", "p")),
        )
    ),
    ([*COSENT, "task.embedding.symmetric=true"], "task.embedding.symmetric", "only `loss: infonce` reads it"),
    (
        ["task.name=embedding", "task.embedding={loss: cosine_mse, temperature: 0.1}"],
        "task.embedding.temperature",
        "only `loss: infonce` and `loss: cosent` read it",
    ),
    (["task.reranking.loss=bce"], "task.reranking.loss", "only `task.name: reranking` reads it"),
]


@pytest.mark.parametrize(("written", "key", "message"), IDLE, ids=[" ".join(row[0]) for row in IDLE])
def test_a_key_that_this_task_does_not_read_is_refused(problems, written, key, message):
    assert any(problem.key == key and message in problem.message for problem in problems(*written))


def test_every_key_that_can_be_idle_has_a_row_in_the_table():
    elsewhere = {"data.truncate_side", "task.loss"}  # their rows are in test_rules.py and tests/plugins
    assert {effect.key for effect in conditional_task_keys()} - elsewhere == {key for _, key, _ in IDLE}


WRONG = [
    ([*COSENT, "data.train.format=pairs"], "data.train.format", "needs a score for each pair"),
    (["task.name=embedding", "data.train.format=scored_pairs"], "data.train.format", "infonce` reads no scores"),
    (["task.name=reranking", "data.train.format=scored_pairs"], "data.train.format", "`task.reranking.loss: bce`"),
    (["task.name=embedding", "data.train.format=text"], "data.train.format", "`pairs`, `retrieval` or `scored_pairs`"),
    (["task.name=embedding", "task.embedding.matryoshka_dims=[8, 8]"], "task.embedding.matryoshka_dims", "twice"),
    ([*COSENT, "task.embedding.normalize=false"], "task.embedding.normalize", "compares cosines"),
    (
        ["task.name=embedding", "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 2}}"],
        "model.peft.type",
        "virtual tokens",
    ),
    (
        ["task.name=embedding", "train.global_batch_size=1", "train.microbatch_size=1"],
        "train.global_batch_size",
        "Write at least 2",
    ),
    (["task.name=embedding", "data.over_length=split"], "data.over_length", "needs whole rows"),
    (["task.name=reranking", "data.batching={by: packs}"], "data.batching.by", "is not trained on packs"),
    (["train.router_aux_loss=auto", "model.compile=full"], "train.router_aux_loss", "in a compiled model"),
    (["report.expert_load=true", "model.compile=regional"], "report.expert_load", "in a compiled model"),
    (["task.z_loss=0.1", "train.loss_kernel=liger"], "train.loss_kernel", "`liger` does not support `task.z_loss`"),
    (["data.max_length=null"], "data.max_length", "the maximum length of a sample in tokens"),
    (["task.name=distillation"], "task.distillation", "there is no teacher"),
    (
        ["task.name=distillation", "task.distillation={teacher: ./teacher, cache: true}"],
        "task.distillation.cache",
        "Set `task.distillation.top_k: 64`",
    ),
    (
        [
            "task.name=distillation",
            "task.distillation={teacher: ./teacher, top_k: 8, cache: true}",
            "data.train.stream={}",
        ],
        "data.train.stream",
        "computed before the first step",
    ),
    (["task.name=seq2seq", "data.over_length=split"], "data.over_length", "needs whole rows"),
    (
        ["task.name=seq2seq", "data.max_length=64", "data.batching={by: tokens, tokens: 100}"],
        "data.batching.tokens",
        "the longest source and the longest target have",
    ),
    (
        ["task.name=masked_lm", "task.masked_lm={random_fraction: 0.6, kept_fraction: 0.6}"],
        "task.masked_lm.random_fraction",
        "together with `kept_fraction` it exceeds 1",
    ),
    (["task.name=text_classification", "task.classification.labels=[a, a]"], "task.classification.labels", "twice"),
    (
        ["task.name=text_classification", "task.classification={labels: [a, b], class_weights: [1.0]}"],
        "task.classification.class_weights",
        "there are 1 weights for 2 labels",
    ),
    (
        ["task.name=text_classification", "task.classification={labels: [a, b], class_weights: [0, 0.0]}"],
        "task.classification.class_weights",
        "with only weights of 0 nothing is trained",
    ),
    (
        ["task.name=text_classification", "task.classification={class_weights: [1.0]}"],
        "task.classification.class_weights",
        "Write `task.classification.labels`",
    ),
    (
        ["task.name=text_classification", "task.classification.labels=[a]"],
        "task.classification.labels",
        "a single class cannot be classified",
    ),
    (["task.name=text_classification", "data.over_length=split"], "data.over_length", "Write `truncate` or `drop`"),
    (["task.name=preference", "data.batching={by: packs}"], "data.batching.by", "is not trained on packs. Write `by:"),
    (["task.name=seq2seq", "data.batching={padding_free: true}"], "data.batching.padding_free", "pads its samples"),
    ([*IMAGES, "data.images={crop_scale: [0.1, 1.0], crop_padding: 4}"], "data.images.crop_padding", "already set by"),
    ([*IMAGES, "data.images.crop_scale=[1.0, 0.1]"], "data.images.crop_scale", "Write `[0.1, 1.0]`"),
    (
        ["task.name=vision_language_sft", "data.images={min_pixels: 900, max_pixels: 800}"],
        "data.images.min_pixels",
        "it is greater than `data.images.max_pixels`",
    ),
    ([*IMAGES, "data.images.size=32", "model.image_processor={size: 64}"], "data.images.size", "already set by"),
    ([*IMAGES, "data.images.cutmix=1.0", "data.train.stream={}"], "data.images.cutmix", "`data.train` is a stream"),
    (
        [*IMAGES, "model.batch_norm=3", "train.microbatch_size=4", "train.global_batch_size=8"],
        "model.batch_norm",
        "a microbatch of 4 is not a multiple of 3. Write a number that divides 4",
    ),
    ([*IMAGES, "model.batch_norm=4", "model.lora={}"], "model.batch_norm", "Write `frozen`"),
    (["task.name=vision_language_sft", "data.over_length=truncate"], "data.over_length", "cut through an image"),
    (["task.name=vision_language_sft", "data.over_length=split"], "data.over_length", "Write `drop`"),
    (["task.name=vision_language_sft", "model.tokenizer={train: {}}"], "model.tokenizer.train", "a tokenizer alone"),
    (["model.lora={}", "model.peft={type: ia3}"], "model.peft", "adapters are already configured by `model.lora`"),
    (["model.quantization={}"], "model.quantization", "quantized weights cannot be trained"),
    (["model.compile=full", "train.embedding_noise=5.0"], "model.compile", "Write `regional`"),
    ([*IMAGES, "model.compile=regional", "model.batch_norm=4"], "model.compile", "keep sums between batches"),
]


@pytest.mark.parametrize(("written", "key", "message"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_missing_keys_of_a_task_or_adapter_are_reported(problems, written, key, message):
    assert any(problem.key == key and message in problem.message for problem in problems(*written))


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


PAIRS = "data.train={path: rows.jsonl, format: preference}"
JUDGED = "data.train={path: rows.jsonl, format: judged}"
STREAM = "data.train={path: rows.jsonl, format: preference, stream: {}}"
ROBUST = "task.preference={loss: robust, label_smoothing: 0.1}"

WRONG_preference_rules = [
    ([PAIRS, "task.preference.loss=robust"], "task.preference.label_smoothing", "`robust` without it is `sigmoid`"),
    ([JUDGED], "data.train.format", "only `task.preference.loss: kto` trains on single answers"),
    ([STREAM], "data.train.stream", "the reference model's log-probabilities are computed before the first step"),
    ([PAIRS, "data.over_length=split"], "data.over_length", "needs whole rows"),
    ([PAIRS, "data.batching={by: packs}"], "data.batching.by", "`padding_free` avoids padding"),
]


@pytest.mark.parametrize(
    ("overrides", "place", "said"), WRONG_preference_rules, ids=[place for _, place, _ in WRONG_preference_rules]
)
def test_missing_keys_of_a_preference_loss_are_reported(problems, overrides, place, said):
    found = problems("task.name=preference", *overrides)
    assert [problem.message for problem in found if problem.key == place and said in problem.message]


@pytest.mark.parametrize(
    "overrides", [[PAIRS], [PAIRS, ROBUST], [JUDGED, "task.preference.loss=kto"], [STREAM, "task.preference.loss=orpo"]]
)
def test_compatible_preference_settings_are_accepted(problems, overrides):
    assert problems("task.name=preference", *overrides) == []


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
