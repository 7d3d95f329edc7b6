import pytest

PROMPT = "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}"
PREFIX = "model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4}}"
BITS = "model.quantization={}"

WRONG = [
    ([PROMPT, "data.batching={by: packs, tokens: 64}"], "data.batching.by", "packed samples would share one learned"),
    ([PREFIX, "data.batching={padding_free: true}"], "data.batching.padding_free", "Write `data.batching.by: samples`"),
    ([PREFIX, "model.gradient_checkpointing=true"], "model.gradient_checkpointing", "a cache"),
    (["model.lora={init: pissa}", "model.dtype=bfloat16"], "model.lora.init", "which `bfloat16` would round"),
    (["model.lora={init: olora}", BITS], "model.lora.init", "Write `loftq`, or `default`"),
    (["model.lora={init: pissa, dora: true}"], "model.lora.dora", "DoRA's magnitudes"),
    (["model.lora={init: loftq}"], "model.lora.init", "`loftq` needs a base quantized by bitsandbytes"),
    (["model.lora={init: loftq, dora: true}", BITS], "model.lora.dora", "Write `init:"),
    ([BITS], "model.quantization", "quantized weights cannot be trained"),
    (
        ["model={from_config: {model_type: llama}, tokenizer: {train: {}}, lora: {}, quantization: {}}"],
        "model.quantization",
        "random weights cannot be quantized",
    ),
    (
        ["model.peft={type: ia3}", "model.quantization={method: torchao, bits: 8}"],
        "model.peft",
        "support it on torchao weights",
    ),
    (["model.lora={}", "model.quantization={method: torchao}"], "model.quantization.bits", "Write `bits: 8`"),
    (["model.new_tokens={}"], "model.new_tokens", "Write `tokens` or `special`, or remove it"),
    (
        ["model.new_tokens={tokens: [a]}", "model.peft={type: oft}"],
        "model.new_tokens",
        "their embeddings would not be trained",
    ),
    (
        ["model.rope_scaling={rope_type: yarn, factor: 2.0}", "model.config={max_position_embeddings: 64}"],
        "model.config.max_position_embeddings",
        "it is already set by `model.rope_scaling`",
    ),
    (
        [
            "model.rope_scaling={rope_type: yarn, factor: 2.0}",
            "model.config={text_config: {rope_parameters: {rope_type: linear, factor: 2.0}}}",
        ],
        "model.config.text_config.rope_parameters",
        "it is already set by `model.rope_scaling`",
    ),
    (["model.lora={}", "model.peft={type: oft}"], "model.peft", "adapters are already configured by `model.lora`"),
]

RIGHT = [
    [PROMPT],
    [PREFIX],
    ["model.lora={init: pissa}"],
    ["model.lora={init: loftq}", BITS],
    ["model.new_tokens={special: ['<|tool|>'], init: pieces}", "model.lora={}"],
    ["model.adapter=./first"],
    ["model.rope_scaling={rope_type: yarn, factor: 2.0}", "model.config={attention_dropout: 0.1, rope_theta: 1e6}"],
    ["model.peft={type: oft}", "model.dtype=bfloat16"],
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
    assert "model.peft.type" in {problem.key for problem in problems(*written)}
