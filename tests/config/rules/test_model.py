import pytest

PROMPT, PREFIX = "model.prompt_tuning={num_tokens: 4}", "model.prefix_tuning={}"
BITS = "model.quantization={}"

WRONG = [
    ([PROMPT, "data.batching={by: packs, tokens: 64}"], "data.batching.by", "share what is learnt before it"),
    ([PREFIX, "data.batching={padding_free: true}"], "data.batching.padding_free", "Write `data.batching.by: samples`"),
    ([PREFIX, "model.gradient_checkpointing=true"], "model.gradient_checkpointing", "a cache"),
    (["model.lora={init: pissa}", "model.dtype=bfloat16"], "model.lora.init", "which `bfloat16` would round"),
    (["model.lora={init: olora}", BITS], "model.lora.init", "are in few bits. Write `loftq`"),
    (["model.lora={init: pissa, dora: true}"], "model.lora.dora", "DoRA's magnitudes"),
    (["model.lora={init: loftq}"], "model.lora.init", "nothing to make up for"),
    (["model.lora={init: loftq, dora: true}", BITS], "model.lora.dora", "before `loftq`"),
    ([BITS], "model.quantization", "cannot learn"),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, lora: {}, quantization: {}}"],
        "model.quantization",
        "random weights gain nothing",
    ),
    (
        ["model.ia3={}", "model.quantization={method: torchao, bits: 8}"],
        "model.ia3",
        "no such adapters on weights of torchao",
    ),
    (["model.lora={}", "model.quantization={method: torchao}"], "model.quantization.bits", "Write `bits: 8`"),
    (
        ["model.ia3={target_modules: [k_proj], feedforward_modules: [down_proj]}"],
        "model.ia3.feedforward_modules",
        "`down_proj` is not in `model.ia3.target_modules`",
    ),
    (["model.new_tokens={}"], "model.new_tokens", "there are none"),
    (["model.new_tokens={tokens: [a]}", "model.oft={}"], "model.new_tokens", "would never learn beside `model.oft`"),
    (["model.lora={}", "model.oft={}"], "model.oft", "there are adapters in `model.lora` already"),
]

RIGHT = [
    [PROMPT],
    [PREFIX],
    ["model.lora={init: pissa}"],
    ["model.lora={init: loftq}", BITS],
    ["model.new_tokens={special: ['<|tool|>'], init: pieces}", "model.lora={}"],
    ["model.adapter=./first"],
    ["model.oft={}", "model.dtype=bfloat16"],
]


@pytest.mark.parametrize(("written", "key", "message"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_adapters_that_cannot_be_meant_are_one_problem(problems, written, key, message):
    (problem,) = problems(*written)
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize("written", RIGHT, ids=" ".join)
def test_adapters_that_can_be_meant_are_let_through(complaints, written):
    assert complaints(*written) == []


def test_a_task_whose_head_picks_a_position_has_nothing_before_its_text(problems):
    written = ("task.name=token_classification", "data.train.format=tagged", PROMPT)
    assert "model.prompt_tuning" in {problem.key for problem in problems(*written)}
