"""QLoRA from start to end: adapters learn on a base in four bits, go on after a stop, and are merged into the base."""

from importlib.util import find_spec

import pytest
from transformers import AutoModelForCausalLM

from tests.devices import EVERY_DEVICE

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]

SIZE = {
    "cpu": [],
    "cuda": [
        "model.from_config.values={hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 4, "
        "num_attention_heads: 8, num_key_value_heads: 2}"
    ],
}
PRECISION = {"cpu": ("fp32", "float32"), "cuda": ("bf16", "bfloat16")}
RATE = {"cpu": "1e-2", "cuda": "1e-3"}
UNTRAINED = ["evaluate=null", "data.validation=null", "train.steps=3", "train.learning_rate=1e-8"]
QUIET = ["evaluate=null", "data.validation=null"]


@EVERY_DEVICE
def test_adapters_on_a_4_bit_base_train_resume_and_are_merged(launch, figure, device):
    base = launch(None, name=f"base-{device}", overrides=[*SIZE[device], *UNTRAINED])
    assert base.code == 0, base.output
    precision, dtype = PRECISION[device]
    overrides = [*QUIET, "model.from_config=null", "model.tokenizer=null", f"model.name={base.folder / 'final'}"]
    overrides += [f"model.quantization={{kind: nf4, compute_dtype: {dtype}}}", f"train.precision={precision}"]
    overrides += ["model.lora={rank: 8, alpha: 16}", "export.merge=true", f"train.learning_rate={RATE[device]}"]
    overrides += ["train.steps=24", "checkpoint.every_steps=12"]
    whole = launch(None, name=f"bits-{device}-whole", overrides=overrides)
    for until in ([*overrides, "train.stop_after_steps=12"], overrides):
        run = launch(None, name=f"bits-{device}", overrides=until)
        assert run.code == 0, run.output
    assert whole.code == 0, whole.output
    assert [event["step"] for event in run.events("RunStarted")] == [0, 12]
    assert run.losses()[-1] < run.losses()[0] - 0.05
    worst = max(abs(got / wanted - 1) for got, wanted in zip(run.losses(), whole.losses(), strict=True))
    figure("QLoRA: relative difference of losses after a resume", worst, at_most=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "final")
    assert getattr(merged.config, "quantization_config", None) is None
    before, after = AutoModelForCausalLM.from_pretrained(base.folder / "final").state_dict(), merged.state_dict()
    changed = [name for name, weight in before.items() if not weight.equal(after[name].to(weight.dtype))]
    assert before.keys() == after.keys()
    assert changed and all("proj" in name for name in changed)
