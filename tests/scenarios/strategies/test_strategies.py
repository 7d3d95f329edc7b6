"""The same job gives the same losses under every strategy, and each leaves a model that loads without this package."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.load import load_config
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_training_data

ROOT = Path(__file__).parents[3]
LORA = "model.lora={rank: 4, alpha: 8}"
full = pytest.mark.full
KINDS = {"full": [], "lora": [LORA]}
STRATEGIES = [
    *((strategy, 2, kind) for strategy in ("ddp", "fsdp2", "zero2", "zero3") for kind in KINDS),
    *(pytest.param(strategy, 2, "full", marks=full) for strategy in ("zero1", "zero2_offload", "zero3_offload")),
    pytest.param("hsdp", 4, "lora", marks=full),
]


@pytest.fixture(scope="module")
def straight(launch):
    """The one-process run of each kind, in one microbatch per step."""
    runs = {
        kind: launch(None, name=f"single-{kind}", overrides=[*overrides, "train.microbatch_size=8"])
        for kind, overrides in KINDS.items()
    }
    for run in runs.values():
        assert run.code == 0, run.output
    return runs


def loaded_model(folder):
    """Load `final/` with transformers and peft alone."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder)


def loss_of_the_exported_model(folder, job):
    """Recompute the evaluation loss row by row from `final/`."""
    lessons = make_training_data(load_config(job).config, RunLog(is_main=False))
    assert AutoTokenizer.from_pretrained(folder).chat_template == lessons.tokenizer.chat_template
    model, loss_sum, num_targets = loaded_model(folder).eval(), 0.0, 0
    for number in range(len(lessons.validation_set)):
        arrays = lessons.validation_set[number].arrays
        ids = torch.from_numpy(arrays["input_ids"].astype("int64"))
        is_target = torch.from_numpy(arrays["is_target"].copy())[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        loss_sum += torch.nn.functional.cross_entropy(logits[is_target], ids[1:][is_target], reduction="sum").item()
        num_targets += int(is_target.sum())
    return loss_sum / num_targets


def test_one_process_trains_and_logs_each_step(straight):
    run = straight["full"]
    assert len(run.losses()) == 8
    assert run.losses()[-1] < run.losses()[0] - 0.5
    assert len({event["num_targets"] for event in run.events("StepTaken")}) > 4  # the batches really are uneven
    assert [event["step"] for event in run.events("Evaluated")] == [4, 8]
    assert sorted(path.name for path in (run.folder / "checkpoints").glob("step-*")) == ["step-000004", "step-000008"]


def test_a_run_keeps_the_audit_of_its_data_and_how_it_was_loaded(straight):
    folder = straight["full"].folder
    audit = json.loads((folder / "audit.json").read_text())
    rows = [audit[name]["counts"]["rows"] for name in ("total", "validation")]
    assert rows == [50, 7]
    assert audit["padding"]["num_samples"] == 48  # six whole steps of eight
    assert json.loads((folder / "environment.json").read_text())["loading"]["num_workers"] == 0


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "processes", "kind"), STRATEGIES)
def test_losses_norms_and_export_equal_one_process(launch, straight, job, strategy, processes, kind):
    accumulated = "train.microbatch_size=1" if kind == "full" else f"train.microbatch_size={8 // processes}"
    run = launch(strategy, name=f"{strategy}-{kind}", processes=processes, overrides=[*KINDS[kind], accumulated])
    assert run.code == 0, run.output
    wanted = straight[kind]
    assert run.losses() == pytest.approx(wanted.losses(), rel=1e-4)
    assert run.norms() == pytest.approx(wanted.norms(), rel=1e-4)
    metrics = run.last_metrics()
    assert metrics["loss"] == pytest.approx(wanted.last_metrics()["loss"], rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-6)
    assert loss_of_the_exported_model(run.folder / "final", job) == pytest.approx(metrics["loss"], rel=1e-4)


@full
@pytest.mark.distributed
def test_adapters_with_dropout_have_the_same_losses_under_every_strategy(launch):
    """Each rank draws its own masks, one for the layers that read the same tensor."""
    short = ["model.lora={rank: 4, alpha: 8, dropout: 0.2}", "train.steps=4"]
    runs = {name: launch(name, name=f"{name}-dropout", overrides=short) for name in ("ddp", "fsdp2", "zero2", "zero3")}
    for run in runs.values():
        assert run.code == 0, run.output
        assert run.losses() == pytest.approx(runs["ddp"].losses(), abs=1e-5)
        assert run.norms() == pytest.approx(runs["ddp"].norms(), rel=1e-4)
    assert len(runs["ddp"].losses()) == 4


@full
@pytest.mark.distributed
def test_fresh_interpreters_give_the_very_losses_of_forked_ranks(launch):
    """What `accelerate launch` starts for a user, and what these tests start to save the imports."""
    cold, warm = launch("zero2", name="cold", is_cold=True), launch("zero2", name="warm")
    assert cold.code == warm.code == 0, cold.output + warm.output
    assert cold.losses() == warm.losses() and len(warm.losses()) == 8
    assert cold.norms() == warm.norms()
    assert cold.last_metrics() == warm.last_metrics()


@full
@pytest.mark.distributed
def test_layers_kept_whole_and_asked_for_early_change_no_number(launch, straight, tmp_path):
    """Three of four microbatches of a rank are no step's last: layers stay whole through them."""
    written = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    asked = written.replace("fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false")
    (tmp_path / "kept.yaml").write_text(f"{asked}\n  fsdp_forward_prefetch: true\n")
    run = launch(str(tmp_path / "kept"), name="fsdp2-kept", overrides=["train.microbatch_size=1"])
    assert run.code == 0, run.output
    assert run.losses() == pytest.approx(straight["full"].losses(), rel=1e-4)
    assert run.norms() == pytest.approx(straight["full"].norms(), rel=1e-4)


@full
@pytest.mark.distributed
def test_fewer_rows_than_ranks_are_each_counted_once(launch):
    """One row for two ranks: one of them evaluates a filler without targets; the metrics are those of one process."""
    one_row = ["data.validation.take=1", "train.stop_after_steps=1", "evaluate.at_start=true"]
    alone = launch(None, name="one-row-alone", overrides=one_row)
    shared = launch("fsdp2", name="one-row-shared", overrides=one_row)
    assert alone.code == shared.code == 0, alone.output + shared.output
    assert shared.last_metrics() == pytest.approx(alone.last_metrics(), rel=1e-6)
