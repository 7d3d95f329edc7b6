from dataclasses import replace

from finetune.export.card import CardBase, CardFacts, write_card

FACTS = CardFacts(
    "gsm8k",
    "sft",
    num_steps=1200,
    metrics={"loss": 0.4567891},
    config_text="run:\n  seed: 42\n",
    software={"torch": "2.13"},
)


def test_a_whole_model_s_card_tells_what_it_is_and_how_to_load_it():
    card = write_card(FACTS, base=None)
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [finetune]\n---\n\n# gsm8k\n"
    )
    assert "Trained for 1,200 steps (task `sft`)" in card
    assert "| loss | 0.456789 |" in card
    assert "model = AutoModelForCausalLM.from_pretrained(folder)" in card
    assert "```yaml\nrun:\n  seed: 42\n```" in card
    assert card.endswith("torch 2.13\n")


def test_an_adapter_s_card_names_its_base():
    card = write_card(FACTS, base=CardBase("org/model"))
    assert "library_name: peft" in card
    assert "base_model: org/model" in card
    assert 'AutoModelForCausalLM.from_pretrained("org/model")' in card
    beside = write_card(FACTS, base=CardBase(None))
    assert "base_model:" not in beside
    assert "its base is in `base/`" in beside


def test_the_loading_code_is_python():
    for base in (None, CardBase(None), CardBase("org/model")):
        code = write_card(FACTS, base=base).split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")


def test_what_is_not_known_leaves_no_empty_heading():
    card = write_card(replace(FACTS, metrics={}, software={}), base=None)
    assert "Metrics" not in card
    assert "Software" not in card
