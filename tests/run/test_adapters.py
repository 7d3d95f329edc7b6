import pytest

from finetune.config.load import load_config
from finetune.errors import StrategyError
from finetune.run.adapters import require_adapters_fit

TOKENS = "model.new_tokens={tokens: [quokka]}"
LORA = "model.lora={}"
FOUR, EIGHT = (f"model={{name: org/base, lora: {{}}, quantization: {{bits: {bits}}}}}" for bits in (4, 8))


@pytest.mark.parametrize(
    ("written", "strategy", "reason"),
    [
        ([TOKENS, LORA], "zero3", "model.new_tokens with model.lora does not work under zero3: peft trains rows"),
        ([FOUR], "zero3", r"bitsandbytes/issues/1249\). Launch with"),
        ([EIGHT], "fsdp2", "FSDP splits nothing but floating-point numbers"),
    ],
)
def test_what_a_strategy_cannot_serve_is_told_with_the_reason(job, written, strategy, reason):
    with pytest.raises(StrategyError, match=reason):
        require_adapters_fit(load_config(job, written).config, strategy)


@pytest.mark.parametrize(
    ("written", "strategy"),
    [([TOKENS], "zero3"), ([TOKENS, LORA], "fsdp2"), ([FOUR], "fsdp2"), ([EIGHT], "ddp"), ([LORA], "zero3")],
)
def test_what_it_can_serve_is_let_through(job, written, strategy):
    require_adapters_fit(load_config(job, written).config, strategy)
