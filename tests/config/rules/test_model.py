import pytest

from tests.refusals import pinned

PROMPT = "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}"
PREFIX = "model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4}}"
BITS = "model.quantization={}"

WRONG = [
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
        ["model.rope_scaling={rope_type: yarn, factor: 2.0}", "model.config={max_position_embeddings: 64}"],
        "model.config.max_position_embeddings",
    ),
    (
        [
            "model.rope_scaling={rope_type: yarn, factor: 2.0}",
            "model.config={text_config: {rope_parameters: {rope_type: linear, factor: 2.0}}}",
        ],
        "model.config.text_config.rope_parameters",
    ),
    (["model.lora={}", "model.peft={type: oft}"], "model.peft"),
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


@pytest.mark.parametrize(("written", "key"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_adapters_that_cannot_be_meant_are_one_problem(problems, written, key):
    (problem,) = problems(*written)
    assert problem.key == key
    pinned(problem)


@pytest.mark.parametrize("written", RIGHT, ids=" ".join)
def test_adapters_that_can_be_meant_are_let_through(complaints, written):
    assert complaints(*written) == []


def test_a_task_whose_head_picks_a_position_has_nothing_before_its_text(problems):
    written = ("task.name=token_classification", "data.train.format=tagged", PROMPT)
    assert "model.peft.type" in {problem.key for problem in problems(*written)}
