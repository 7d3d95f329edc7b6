"""Ranks that share the tokens of every row learn what one process does."""

import json
import math
from pathlib import Path

import pytest

from tests import launching
from tests.devices import NEEDS_DEEPSPEED
from tests.scenarios.conftest import launch_in_turn

ROOT = Path(__file__).parents[3]
full = pytest.mark.full
pytestmark = pytest.mark.distributed

PACKS = (
    "data.max_length=61",
    "data.batching={by: packs, tokens: 61}",
    "train.global_batch_size=4",
    "train.steps=6",
    "report.sample_ids=true",
)
"""61 tokens are no multiple of any number of ranks."""

LORA = "model.lora={rank: 4, alpha: 8, dropout: 0.0}"
HEADS_OF_3 = (
    "model.from_config.values={hidden_size: 48, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 6, "
    "num_key_value_heads: 2}"
)
NOT_FINITE = {"faults": "forward step=2 rank=1 do=nan"}


@pytest.fixture(scope="module")
def alone(launch):
    """Return the one-process run with these settings."""
    found = {}

    def run(*overrides: str):
        if overrides not in found:
            found[overrides] = launch(None, name=f"rows-alone-{len(found)}", overrides=overrides)
            assert found[overrides].code == 0, found[overrides].output
        return found[overrides]

    return run


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """Return the path of an accelerate config under which so many ranks share rows, without its suffix."""

    def write(strategy: str, degree: int) -> str:
        path = tmp_path_factory.mktemp("accelerate") / f"{strategy}_{degree}.yaml"
        written = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text()
        if "parallelism_config:" not in written:
            written += "\nparallelism_config:\n"
        path.write_text(f"{written}\n  parallelism_config_sp_size: {degree}\n")
        return str(path.with_suffix(""))

    return write


def assert_equal(run, wanted):
    assert run.code == 0, run.output
    assert run.losses() == pytest.approx(wanted.losses(), rel=1e-4)
    assert run.norms() == pytest.approx(wanted.norms(), rel=1e-4)
    assert run.last_metrics()["loss"] == pytest.approx(wanted.last_metrics()["loss"], rel=1e-4)
    assert [event["num_tokens"] for event in run.events("StepTaken")] == [
        event["num_tokens"] for event in wanted.events("StepTaken")
    ]


def test_two_sequence_parallel_ranks_have_the_losses_of_one_process(launch, alone):
    run = launch("ddp_sequence_parallel", name="rows-ddp", overrides=["train.microbatch_size=2"])
    assert "shares sequences over groups of 2" in run.output
    assert_equal(run, alone("train.microbatch_size=8"))


@full
@pytest.mark.parametrize(
    ("strategy", "processes", "degree", "settings"),
    [
        ("fsdp2", 4, 2, ("train.microbatch_size=1", LORA, "model.gradient_checkpointing=true")),
        ("ddp", 3, 3, ("train.microbatch_size=2", "train.try_longest_batch=always", HEADS_OF_3)),
        ("hsdp", 4, 2, ("train.microbatch_size=2",)),
        pytest.param("zero2", 2, 2, ("train.microbatch_size=4",), marks=NEEDS_DEEPSPEED),
        pytest.param("zero3", 2, 2, ("train.microbatch_size=4",), marks=NEEDS_DEEPSPEED),
    ],
)
def test_strategies_with_sequence_parallelism_have_the_losses_of_one_process(
    launch, alone, sharing, strategy, processes, degree, settings
):
    name = f"rows-{strategy}-{processes}-{degree}"
    config = sharing(strategy, degree)
    if strategy == "hsdp":
        path = Path(f"{config}.yaml")
        path.write_text(path.read_text().replace("dp_shard_size: 2", "dp_shard_size: 1"))
    run = launch(config, name=name, processes=processes, overrides=settings)
    others = [each for each in settings if "batch" not in each]
    assert_equal(run, alone("train.microbatch_size=8", *others))


@full
def test_a_run_resumes_under_other_degrees_with_the_very_next_samples(launch, alone, sharing, tmp_path):
    """Two steps with 4 ranks for a row under DDP, two with 2 under FSDP2, the last two on one process."""
    wanted = alone(*PACKS, "train.microbatch_size=4")
    stages = ((sharing("ddp", 4), 4, 2), (sharing("fsdp2", 2), 4, 4), (None, 1, 6))
    overrides = [*PACKS, "train.microbatch_size=1", "checkpoint.every_steps=2"]
    run = launch_in_turn(launch, name="rows-resumed", overrides=overrides, stages=stages, num_steps=6)
    assert "the checkpoint was written under fsdp2 with rows shared by 2 (processes: 4)" in run.output
    assert_equal(run, wanted)
    assert run.samples() == wanted.samples()
    assert len(run.samples()) == 6


@full
def test_a_step_that_is_not_finite_in_one_slice_is_skipped_on_all_ranks(launch, alone):
    skips = ("train.nonfinite.action=skip", "train.steps=5")
    run = launch(
        "fsdp2_sequence_parallel", name="rows-nan", overrides=[*skips, "train.microbatch_size=8"], **NOT_FINITE
    )
    assert run.code == 0, run.output
    (skipped,) = run.events("StepSkipped")
    assert (skipped["step"], len(skipped["sample_ids"])) == (3, 8)
    assert [math.isfinite(loss) for loss in run.losses()] == [True, True, False, True, True]


@full
def test_loss_and_gradient_of_shared_rows_are_those_of_whole_ones(tmp_path, figure):
    """Windows, soft caps, sinks, few key heads, latent attention, experts; adapters and checkpointing."""
    kinds = ("mistral", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "checkpointed", "adapted", "keys-of-one")
    words = ("-m", "tests.scenarios.strategies.slices_program", str(tmp_path / "found.json"), "2,4", *kinds)
    ended = launching.capture(launching.torchrun_command(*words, processes=4), timeout_seconds=200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2 * len(kinds)
    figure("rows shared by 2 and 4: loss, relative", max(each["loss"] for each in found.values()), at_most=1e-5)
    worst = max(each["gradient"] for each in found.values())
    figure("rows shared by 2 and 4: gradient, relative to its largest number", worst, at_most=1e-5)


@full
def test_a_row_of_4_times_the_length_takes_the_same_memory_on_each_of_4_ranks(tmp_path, figure):
    words = ("-m", "tests.scenarios.strategies.slices_memory_program", str(tmp_path / "found.json"))
    ended = launching.capture(launching.torchrun_command(*words, processes=4), timeout_seconds=200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    ratios = {name: each["shared"] / each["alone"] for name, each in found.items()}
    assert len(ratios) == 2
    figure(
        "memory of a row of 4 times the length on each of 4 ranks, of the row on one",
        max(ratios.values()),
        at_most=1.15,
    )
