"""A run that is killed or stopped and goes on is, bit by bit, the run that was never stopped."""

import sys

import pytest

from finetune.checkpoint.format.layout import steps
from finetune.checkpoint.format.manifest import read_manifest
from tests.launching import capture
from tests.sample_records import read_samples

KINDS = {"full": [], "lora": ["model.lora={rank: 4, alpha: 8, dropout: 0.1}"]}
NOTHING_ELSE = ["evaluate=null", "data.validation=null"]
EPOCHS = [*NOTHING_ELSE, "data.train.take=22", "data.num_workers=1"]
HARD = [*EPOCHS, "train.microbatch_size=2", "checkpoint.every_steps=2"]
"""22 rows in batches of 8: the first epoch ends within step 3. Microbatches of 2 on 2 ranks: two are accumulated."""

KILL_IN_STEP_6 = "update.after step=5 rank=1 do=kill"
full, slow = pytest.mark.full, pytest.mark.slow


def state_of(run):
    *_, last = steps(run.folder / "checkpoints").values()
    return read_manifest(last).state_sha256


def facts_by_step(run):
    """Return what was said of each step, by every launch that took it."""
    facts = {}
    for event in run.events("StepTaken"):
        facts.setdefault(event["step"], []).append(
            [event[name] for name in ("loss", "gradient_norm", "learning_rate", "samples_sha256", "epoch")]
        )
    return facts


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp2", "lora"),
        ("zero3", "full"),
        *(pytest.param(*each, marks=full) for each in (("ddp", "full"), ("zero1", "lora"), ("zero2", "lora"))),
    ],
)
def test_a_killed_run_resumes_bitwise_identical(launch, strategy, kind):
    overrides, name = [*HARD, *KINDS[kind]], f"exact-{strategy}-{kind}"
    whole = launch(strategy, name=f"{name}-whole", overrides=overrides)
    killed = launch(strategy, name=name, overrides=overrides, faults=KILL_IN_STEP_6)
    assert killed.code != 0
    assert list(facts_by_step(killed)) == [1, 2, 3, 4, 5], killed.output
    resumed = launch(strategy, name=name, overrides=overrides)
    assert whole.code == resumed.code == 0, whole.output + resumed.output
    first, second = (event["step"] for event in resumed.events("RunStarted"))
    assert first == 0 and second in (2, 4)  # 2 where the fourth step's checkpoint was still being written
    wanted, got = facts_by_step(whole), facts_by_step(resumed)
    assert list(wanted) == list(got) == list(range(1, 9))
    assert len(got[5]) == 2  # taken before the kill and again after it
    assert all(fact == wanted[step][0] for step, facts in got.items() for fact in facts)
    assert len(state_of(whole)) == 64
    assert state_of(resumed) == state_of(whole)


@full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("source", "target", "verdict"),
    [
        ("ddp:4", "ddp:4", "losses bitwise"),  # above two ranks DDP's buckets decide how sums are rounded
        pytest.param("ddp:2", "zero3:4", "losses within 0.0001", marks=slow),
    ],
)
def test_verify_resume_confirms_exact_resume_on_a_job(job, source, target, verdict):
    command = [sys.executable, "-m", "finetune", "verify", "resume", "--config", str(job), "--stop-at", "3"]
    command += ["--steps", "5", "--from", source, "--to", target]
    for override in (*EPOCHS, *KINDS["lora"]):
        command += ["--set", override]
    ended = capture(command, timeout_seconds=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"equal: samples exactly, {verdict}" in ended.stdout
    assert ("dropout off" in ended.stdout) == (source != target)


@full
@pytest.mark.distributed
def test_three_epochs_with_two_stops_on_1_2_and_4_processes_consume_the_samples_of_an_uninterrupted_run(launch):
    rows = [*NOTHING_ELSE, "data.train.take=28", "train.global_batch_size=12", "train.microbatch_size=3"]
    rows += ["train.steps=7", "report.sample_ids=true"]  # 7 x 12 = 3 x 28; both inner ends of epochs are within a step
    straight = launch(None, name="ids-straight", overrides=rows)
    assert straight.code == 0, straight.output
    starts = [(None, 1, 3), ("fsdp2", 2, 5), ("ddp", 4, 7)]
    for strategy, processes, stop in starts:
        until = f"train.stop_after_steps={stop}"
        parts = launch(strategy, name="ids", processes=processes, overrides=[*rows, "data.num_workers=1", until])
        assert parts.code == 0, parts.output
    wanted, got = read_samples(straight.folder), read_samples(parts.folder)
    assert [len(got[step]) for step in range(1, 8)] == [1, 1, 1, 2, 2, 4, 4]  # ranks that took part
    for step in range(1, 8):
        assert sorted(in_order(got[step])) == sorted(in_order(wanted[step]))
    for record in (wanted, got):
        ids = [each for step in range(1, 8) for each in in_order(record[step])]
        for epoch in range(3):
            assert sorted(ids[28 * epoch : 28 * (epoch + 1)]) == list(range(28))  # no repeat, none missing


def in_order(ranks):
    """Return a step's sample ids in the order of the data: rank r is handed every world-th microbatch from r on."""
    return [sample for microbatches in zip(*ranks, strict=True) for each in microbatches for sample in each]
