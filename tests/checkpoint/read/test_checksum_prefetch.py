import pytest
import torch

from finetune.checkpoint.format.manifest import file_checksum
from finetune.checkpoint.read import checksum_prefetch as checksum_prefetch
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch, start_checksum_prefetch
from finetune.checkpoint.sharding.state_layout import create_empty_state, create_state_by_step
from tests.checkpoint.small_run import Run


def written(path, content=b"a" * 3_000_000):
    path.write_bytes(content)
    return path


def test_prefetched_checksums_are_not_computed_again(tmp_path, monkeypatch):
    paths = [written(tmp_path / str(number)) for number in range(5)]
    prefetch = ChecksumPrefetch(paths, num_threads=3)
    for future in prefetch._futures.values():
        future.result()
    monkeypatch.setattr(checksum_prefetch, "file_checksum", lambda path: pytest.fail(f"{path} is read again"))
    assert len({prefetch.checksum(path).sha256 for path in paths}) == 1


def test_a_file_that_has_changed_since_is_read_again(tmp_path):
    path = written(tmp_path / "file")
    prefetch = ChecksumPrefetch([path])
    prefetch._futures[path].result()
    written(path, b"other")
    assert prefetch.checksum(path) == file_checksum(path)


def test_no_checksum_is_prefetched_when_the_run_does_not_resume(folder):
    assert not start_checksum_prefetch(folder, resume="auto")._futures
    Run(folder).train(range(1))
    assert not start_checksum_prefetch(folder, resume="never")._futures
    (folder / "step-000001" / "manifest.json").write_text("{")
    assert not start_checksum_prefetch(folder, resume="auto")._futures


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"amsgrad": True}, {"capturable": False, "foreach": True}])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.Adam])
def test_empty_state_has_the_layout_of_the_optimizer(rule, settings):
    laid_out = []
    for make in (create_state_by_step, create_empty_state):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.bfloat16))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # another order of memory
        groups = [{"params": [each], "weight_decay": 0.1, "more": "of ours"} for each in model.parameters()]
        optimizer = rule(groups, lr=0.1, **settings)
        make(optimizer)
        laid_out.append(
            [
                {key: (value.shape, value.dtype, value.stride(), value.device) for key, value in state.items()}
                for state in (optimizer.state[each] for each in model.parameters())
            ]
        )
    assert laid_out[0] == laid_out[1]
    assert all(laid_out[0])


def test_an_optimizer_with_hooks_makes_its_state_itself():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.state[parameter].update(average=parameter + 0))
    create_empty_state(optimizer)
    assert "average" in optimizer.state[parameter]


def test_prefetched_tensors_become_the_optimizer_state_without_a_copy(folder):
    straight = Run(folder, width=300).train(range(2)).train(range(2, 4), save=False)
    resumed = Run(folder, width=300)
    resumed.checksums = prefetch = start_checksum_prefetch(folder, resume="auto")
    resumed.resume()
    moments = [state["exp_avg"] for state in resumed.optimizer.state.values()]
    assert len({moment.untyped_storage().data_ptr() for moment in moments}) == 1  # the file's bytes
    assert not prefetch._cached
    resumed.train(range(2, 4), save=False)
    for name, value in straight.everything().items():
        assert torch.equal(resumed.everything()[name], value), name


def test_state_that_is_laid_out_otherwise_is_copied(folder):
    def transposed(run):
        weight = run.model[0].weight
        weight.data = weight.data.t().contiguous().t()
        return run

    straight = transposed(Run(folder)).train(range(2))
    resumed = transposed(Run(folder))
    resumed.checksums = start_checksum_prefetch(folder, resume="auto")
    resumed.resume()
    moment = resumed.optimizer.state[resumed.model[0].weight]["exp_avg"]
    assert moment.stride() == resumed.model[0].weight.stride()
    for name, value in straight.everything().items():
        assert torch.equal(resumed.everything()[name], value), name


def test_a_bad_file_that_is_kept_is_passed_over(folder):
    Run(folder).train(range(2))
    file = folder / "step-000002" / "optimizer" / "00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    run = Run(folder)
    run.checksums = start_checksum_prefetch(folder, resume="auto")
    assert run.resume()["step"] == 1
