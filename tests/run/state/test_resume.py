import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.run.state.resume import format_restored, format_strategy_change, has_comparable_best


def facts(strategy="ddp", processes="2", **settings):
    return RunFingerprint({}, settings, {"strategy": strategy, "processes": processes})


def test_restored_and_derived_state_is_logged_on_resume():
    assert list(format_restored(1200, is_scaled=False, was_scaled=True)) == [
        "restored: parameters, optimizer state and step",
        "derived: random numbers from seed, step and rank; learning rate from the step; "
        "data position 1,200 from step x global batch",
    ]


@pytest.mark.parametrize(
    ("was_scaled", "said"),
    [
        (True, "optimizer state, step and loss scale"),
        (False, "and step; the loss scale is reset: the checkpoint has none"),
    ],
)
def test_a_restored_loss_scale_is_logged(was_scaled, said):
    assert next(format_restored(0, is_scaled=True, was_scaled=was_scaled)).endswith(said)


@pytest.mark.parametrize("now", [("fsdp2", "4"), ("zero2", "2"), ("ddp", "4")])
def test_another_strategy_or_number_of_processes_is_logged_as_a_change_of_rounding(now):
    (line,) = format_strategy_change(facts(), current=facts(*now))
    assert "under ddp (processes: 2)" in line and f"under {now[0]} (processes: {now[1]})" in line
    assert list(format_strategy_change(facts(), current=facts())) == []


def test_the_best_of_another_metric_cannot_be_compared():
    of_loss, of_accuracy = (facts(**{"train.early_stopping.metric": name}) for name in ("loss", "accuracy"))
    assert has_comparable_best(of_loss, current=of_loss)
    assert not has_comparable_best(of_loss, current=of_accuracy)


@pytest.fixture
def base(tmp_path):
    """The folder of a model as others would have saved it."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.full
@pytest.mark.distributed
def test_an_adapter_resumes_only_on_the_base_weights_it_was_trained_on(launch, base, tmp_path):
    def start(place, *overrides):
        model = f"{{name: {place}, lora: {{rank: 2, dropout: 0.1}}, tokenizer: {{train: {{vocabulary_size: 320}}}}}}"
        return launch(None, name="on-a-base", overrides=[f"model={model}", *overrides])

    begun = start(base, "train.stop_after_steps=2")
    assert begun.code == 0, begun.output

    weights = base / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = start(base, "train.learning_rate=2e-2")
    assert refused.code == 2
    assert "train.learning_rate: 0.01 in the checkpoint, 0.02 in this run" in refused.output
    assert "base weights cannot be changed: the training so far was on top of the others." in refused.output

    weights.write_bytes(whole)
    moved = base.rename(tmp_path / "moved")
    allowed = "checkpoint.allow_changes=[model.name, train.learning_rate, train.steps]"
    went_on = start(moved, "train.learning_rate=2e-2", "report.log_every_steps=2", allowed)
    assert went_on.code == 0, went_on.output
    assert (
        f'allowed by checkpoint.allow_changes: model.name "{base}" -> "{moved}", train.learning_rate 0.01 -> 0.02'
        in went_on.output
    )
    assert "report.log_every_steps 1 -> 2" in went_on.output
    assert "has no effect, unchanged since the checkpoint: train.steps" in went_on.output
    assert "restored: parameters, optimizer state and step" in went_on.output
    assert [event["step"] for event in went_on.events("StepTaken")] == list(range(1, 9))
