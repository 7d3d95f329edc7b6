"""What a step sends between ranks and copies within one: no more than the strategy needs, plus one count."""

import json

import pytest

from tests.launching import accelerate_command, run

pytestmark = [pytest.mark.full, pytest.mark.distributed]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_sends_gradients_weights_a_norm_and_a_count_and_copies_no_bucket(strategy, job, tmp_path):
    pytest.importorskip("deepspeed")
    overrides = [f"run.folder={tmp_path / 'run'}", "train.steps=4", "train.schedule={name: constant}"]
    overrides += ["train.microbatch_size=4"]
    program = ["-m", "tests.scenarios.memory.step_traffic_program", str(tmp_path / "rank"), str(job), *overrides]
    log = tmp_path / "log.txt"
    assert run(accelerate_command(strategy, *program), log=log, timeout_seconds=540) == 0, log.read_text()[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        num_bytes = 4 * found["trained"]
        kinds = [each.split() for each, count in found["sent"].items() for _ in range(count)]
        large = sorted(kind for kind, _, size in kinds if int(size) >= num_bytes // 2)
        small = [(kind, dtype) for kind, dtype, size in kinds if int(size) < num_bytes // 2]
        assert large == ["allgather_base", "allreduce"], kinds
        assert sorted(small) == [("allreduce", "torch.float32"), ("allreduce", "torch.int64")], kinds
        assert str(num_bytes) not in found["joined"], "the whole bucket was copied before it was reduced"
