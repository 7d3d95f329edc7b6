import pytest

WRONG = [
    ("train.learning_rate='1e-4'", '`"1e-4"` is text. Did you mean `1e-4`, without quotes? Write a number above 0.'),
    ("train.learning_rate=0", "`0` is not allowed. Write a number above 0."),
    ("train.learning_rate=.inf", "is not allowed. Write a number above 0."),
    ("train.steps=1e3", "`1000.0` is a number. Did you mean `1000`? Write a whole number of at least 1, or `null`."),
    ("train.steps=-1", "`-1` is not allowed. Write a whole number of at least 1, or `null`."),
    ("train.steps=true", "`true` is a truth value. Write a whole number of at least 1, or `null`."),
    ("data.shuffle=yes", '`"yes"` is text. Did you mean `true`? Write `true` or `false`.'),
    ("task.name=pretraining", "Did you mean `pretrain`? Write `sft`, `pretrain`"),
    ("run.strategy=fsdp", "Did you mean `fsdp2`? Write `single`, `ddp`, `fsdp2`"),
    ("run.strategy=fsdp1", "Did you mean `fsdp2`?"),
    ("model.dtype=BFLOAT16", "Did you mean `bfloat16`?"),
    ("model.revision=1.0", '`1.0` is a number. Did you mean `"1.0"`? Write text, or `null`.'),
    ("model.freeze=wte.*", '`"wte.*"` is text. Did you mean `[wte.*]`? Write a list of texts.'),
    ("model.lora={target_modules: 3}", 'Did you mean `["3"]`? Write a list of texts or `all-linear`.'),
    ("model.lora={target_modules: all_linear}", "Did you mean `all-linear`? Write a list of texts or `all-linear`."),
    ("model.lora=16", "Did you mean `{rank: 16}`?"),
    ("train=16", "Its keys are `global_batch_size`, `microbatch_size`"),
    ("train.optimizer.betas=[0.9]", "Write a list of 2 numbers of at least 0 and below 1."),
    ("train.optimizer.betas=[0.9, 1.5]", "`1.5` is not allowed. Write a number of at least 0 and below 1."),
    ("train.schedule={warmup_fraction: 2}", "Write a number from 0 to 1, or `null`."),
    ("checkpoint.keep_last=1", "Write a whole number of at least 2."),
    ("checkpoint.resume=3", "Write `auto` or `never` or a path."),
    ("export.max_shard_size=5 GB", "Write text such as `5GB`."),
    ("data.max_length=null", "the maximum length of a sample in tokens"),
    ("data.train.columns={prompt: -3}", "Write text or a whole number of at least 0 or a list"),
    ("data.train.columns={prompt: [a, b]}", "[a, b]` is a list. To join columns, write a `template`."),
    ("evaluate=true", "`true` is a truth value. Did you mean `{}`?"),
]

UNKNOWN = [
    ("train.learningrate=1", "Did you mean `learning_rate`?"),
    ("train.Steps=1", "Did you mean `steps`?"),
    ("data.microbatch_size=1", "There is `train.microbatch_size` and `evaluate.microbatch_size`."),
    ("model.max_length=1", "There is `data.max_length`."),
    ("data.microbatchsize=1", "There is `train.microbatch_size` and"),
    ("model.lora={bias: all}", "`model.lora` has `rank`, `alpha`"),
    ("train.per_device_train_batch_size=1", "Did you mean `microbatch_size`?"),
    ("train.gradient_accumulation_steps=1", "accumulation is derived"),
    ("train.bf16=true", "write `train.precision: bf16`"),
    ("report.wandb_api_key=x", "secrets do not belong in a job file"),
    ("task.zzzz=1", "`task` has `name`,"),
    ("deepspeed=x.json", "the strategy is chosen by the accelerate config"),
]


@pytest.mark.parametrize(("written", "message"), WRONG, ids=[written for written, _ in WRONG])
def test_an_invalid_value_is_reported_with_the_value_and_the_allowed_ones(complaints, written, message):
    (said,) = complaints(written)
    assert message in said


@pytest.mark.parametrize(("written", "message"), UNKNOWN, ids=[written for written, _ in UNKNOWN])
def test_an_unknown_key_is_reported_with_the_most_similar_one(complaints, written, message):
    (said,) = complaints(written)
    assert "there is no such key" in said
    assert message in said


def test_a_missing_key_is_reported_with_its_meaning(job, complaints):
    text = job.read_text().replace("  learning_rate: 1e-4\n", "")
    assert complaints(text=text) == [
        "train.learning_rate: the key is missing: peak learning rate. Write a number above 0."
    ]


def test_two_columns_of_a_task_of_texts_are_text_and_text_pair(complaints):
    said = complaints("task.name=text_classification", "data.train.columns={text: [1, 2], label: 0}")
    wanted = "`[1, 2]` is a list. The second of two texts is `text_pair`: `{text: 1, text_pair: 2}`."
    assert any(wanted in each for each in said)


def test_the_tag_of_a_union_is_not_taken_for_a_key(complaints):
    (said,) = complaints("model.lora={target_modules: [q_proj, 3]}")
    assert "model.lora.target_modules" in said
    assert "tuple" not in said
    assert "literal" not in said
