"""Ranks that need a set which another process makes wait on a file, in no collective, and take over when it dies."""

import pytest


@pytest.mark.full
@pytest.mark.distributed
def test_training_waits_for_a_cache_in_preparation_and_prepares_it_if_the_other_process_is_killed(begin, tmp_path):
    cache = tmp_path / "cache"
    overrides = [f"data.cache_folder={cache}", "evaluate=null", "data.validation=null", "train.steps=3"]
    maker = begin(None, name="maker", overrides=overrides, faults="prepare.write step=1 do=sleep")
    maker.until(lambda: list((cache / "prepared").glob(".*.making")))
    run = begin("ddp", name="heir", overrides=overrides)
    run.until(lambda: "waiting for another process that builds" in run.output)
    assert maker.process.poll() is None
    maker.process.kill()
    assert run.until_ended() == 0, run.output
    assert run.steps() == 3
    assert run.output.count("data.train: prepared in") + run.output.count("data.train: already prepared in") == 1
    made = [path for path in (cache / "prepared").iterdir() if path.is_dir()]
    assert len(made) == 1
    assert not made[0].name.startswith(".")
