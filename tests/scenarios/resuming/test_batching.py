"""Mixes and packs in whole runs: the same samples and losses on 1, 2 and 4 processes, stopped, packed or padded."""

import re

import pytest

from finetune.data.order.order import split_sample_id

NO_EVALUATION = ["evaluate=null", "data.validation=null"]
MIX = (
    "data.train={mix: [{path: train.jsonl, take: 20, weight: 5}, {path: train.jsonl, skip: 20, take: 24, weight: 3}, "
    "{path: train.jsonl, skip: 44, weight: 2}]}"
)
PACKED_MIX = [
    *NO_EVALUATION,
    MIX,
    "data.batching={by: packs, tokens: 160}",
    *("train.global_batch_size=8", "train.microbatch_size=2", "train.steps=6", "report.sample_ids=true"),
]


@pytest.mark.full
@pytest.mark.distributed
def test_a_packed_mix_of_three_takes_the_same_samples_on_1_2_and_4_processes_with_a_stop_between(launch):
    straight = launch(None, name="mix-straight", overrides=PACKED_MIX)
    assert straight.code == 0, straight.output
    for strategy, processes, stop in (("zero2", 2, 3), ("ddp", 4, 6)):
        until = f"train.stop_after_steps={stop}"
        parts = launch(strategy, name="mix", processes=processes, overrides=[*PACKED_MIX, "data.num_workers=1", until])
        assert parts.code == 0, parts.output
    assert parts.samples() == straight.samples()
    assert list(straight.samples()) == list(range(1, 7))
    assert parts.losses() == pytest.approx(straight.losses(), rel=1e-5)
    seen = [split_sample_id(i) for ids in straight.samples().values() for i in ids]
    assert {place.source for place in seen} == {0, 1, 2}
    told = re.findall(r"data.train.mix.(\d) .* (\d+) of 48 packs in this run", straight.output)
    assert [int(count) for _, count in told] == pytest.approx([24, 14.4, 9.6], abs=2)
    assert re.search(r"data.train.mix.2 .* passes over its \d", straight.output)
    assert straight.output.count("packs of at most 160: ") == 3


@pytest.mark.full
@pytest.mark.distributed
def test_packed_and_padded_steps_of_the_same_samples_have_the_same_losses(launch):
    few = ["data.train.take=8", "train.steps=4"]
    padded = launch(None, name="few-padded", overrides=[*few, "data.batching.padding_free=false"])
    packed = launch(
        None,
        name="few-packed",
        overrides=[
            *few,
            *("data.batching={by: packs, tokens: 4096}", "train.global_batch_size=1", "train.microbatch_size=1"),
        ],
    )
    assert padded.code == packed.code == 0, padded.output + packed.output
    assert "8 samples / 8" not in packed.output
    assert packed.losses() == pytest.approx(padded.losses(), rel=1e-5)
    assert packed.norms() == pytest.approx(padded.norms(), rel=1e-4)
    assert packed.last_metrics() == pytest.approx(padded.last_metrics(), rel=1e-5)
