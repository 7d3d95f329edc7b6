"""A job that streams takes the same samples at the same steps on any number of processes, wherever it is taken up."""

import json
import random
import re

import pytest

from finetune.data.order.order import split_sample_id, split_stream_index
from tests.sample_records import read_samples
from tests.scenarios.resuming.test_exactness import NOTHING_ELSE, in_order

NUM_STEPS = 9
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def parts(job):
    """Five files of rows beside the job, and five of which the last has a row that is too long."""
    chance = random.Random(2)
    for folder, is_good in (("parts", True), ("refused", False)):
        (job.parent / folder).mkdir()
        for number in range(5):
            rows = [_row(f"{chance.randint(10, 99)} {'and so on ' * chance.randint(0, 3)}") for _ in range(9)]
            if not is_good and number == 4:
                rows[3] = _row("far too long " * 40)
            (job.parent / folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job.parent


def _row(text):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text.split()[0]}]}


def overrides(folder, **settings):
    stream = f"{{path: '{folder}/*.jsonl', weight: 2, stream: {{window_rows: 16, num_ahead: 1}}}}"
    mix = f"data.train={{mix: [{stream}, {{path: {folder.parent}/train.jsonl, weight: 1}}]}}"
    named = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    batching = "data.batching={by: packs, tokens: 128}"
    return [*NOTHING_ELSE, mix, batching, f"train.steps={NUM_STEPS}", "train.microbatch_size=2", *named]


@pytest.mark.full
@pytest.mark.distributed
def test_a_stream_within_a_mix_resumes_at_the_next_sample_from_any_step(launch, parts):
    """Packed, too; and neither of the later starts finds anything of the stream that the one before has prepared."""
    told = {"report__sample_ids": "true"}
    straight = launch(None, name="stream-straight", overrides=overrides(parts / "parts", **told))
    assert straight.code == 0, straight.output
    for strategy, processes, end in (("fsdp2", 2, 4), ("ddp", 4, 9)):
        told |= {"data__cache_folder": f"{parts}/cache-{processes}", "train__stop_after_steps": end}
        told["data__num_workers"] = 1
        ended = launch(strategy, name="stream", processes=processes, overrides=overrides(parts / "parts", **told))
        assert ended.code == 0, ended.output
    wanted, got = read_samples(straight.folder), read_samples(ended.folder)
    assert [len(got[step]) for step in range(1, NUM_STEPS + 1)] == [2] * 4 + [4] * 5
    for step in range(1, NUM_STEPS + 1):
        assert sorted(in_order(got[step])) == sorted(in_order(wanted[step]))
    assert ended.losses() == pytest.approx(straight.losses(), abs=TOLERANCE)
    ids = [each for step in range(1, NUM_STEPS + 1) for each in in_order(wanted[step])]
    places = [split_stream_index(split_sample_id(each).within) for each in ids if split_sample_id(each).source == 0]
    assert len(set(places)) == len(places) > 60  # the second pass, in windows of its own, has begun
    assert max(window for window, _ in places) >= 4
    (windows,) = parts.glob("cache-4/streams/*/windows")
    assert 0 < len(list(windows.iterdir())) <= 6  # however many were prepared


@pytest.mark.full
@pytest.mark.distributed
def test_a_refused_row_ends_all_ranks_with_one_message(launch, parts):
    settings = {"data__cache_folder": f"{parts}/cache-refused"}
    ended = launch("ddp", name="stream-refused", overrides=overrides(parts / "refused", **settings))
    assert ended.status()["exit_code"] == 2
    (message,) = re.findall(r"^(?:\[rank \d\] )?error: (.*)$", ended.output, flags=re.MULTILINE)
    assert re.match(r"data\.train\.mix\.0: window \d: 1 of \d+ rows are longer than data\.max_length: 128", message)
    assert "refused/4.jsonl, row 4" in message
    assert len(ended.losses()) > 0  # the rows before it were trained on
