"""Each workaround does what it promises, and is still needed: a test here that fails says which one may go."""

import inspect
import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import StrategyError
from finetune.strategy.upstream import (
    CHECKED_WITH,
    MIN_BUCKET_NUMEL,
    broadcast_rank_0_buffers,
    complete_zero_config,
    drop_not_yet_unfrozen_from_zero_norm,
    gloo_bridge,
    keep_bf16_parameters,
    keep_ddp_buffers_local,
    prefetch_fsdp2_layers,
    reduce_zero_buckets_in_place,
    unsharded,
    warm_up_ddp_buckets,
    widen_unfilled_parameters,
    without_accelerate_parallelism,
    zero_bucket_sizes,
)


@pytest.mark.parametrize("package", CHECKED_WITH)
def test_no_package_is_newer_than_the_workarounds_were_checked_with(package):
    pytest.importorskip(package)
    newest = Version(CHECKED_WITH[package])
    assert Version(version(package)).release[:2] <= newest.release, (
        f"look at each workaround for {package} in strategy/upstream.py, then raise CHECKED_WITH"
    )


@pytest.fixture
def group(monkeypatch):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_state(monkeypatch):
    """No state of Accelerate's before the test, and the former one afterwards."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the bridge is for machines without a GPU")


@needs_no_gpu
def test_the_bridge_makes_a_state_over_gloo_that_fsdp_accepts(group, no_state):
    with gloo_bridge():
        state = PartialState()
    assert (state.backend, state.distributed_type, state.device.type) == ("gloo", DistributedType.MULTI_GPU, "cpu")
    assert state.num_processes == 1


@needs_no_gpu
def test_accelerate_still_runs_nothing_distributed_on_cpus_but_ddp(group, no_state):
    assert PartialState(backend="gloo").distributed_type == DistributedType.NO
    PartialState._shared_state.clear()
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    sharded = inspect.getsource(AcceleratorState.__init__).partition("elif self.distributed_type in [")[2]
    assert "MULTI_GPU" in sharded.partition("]")[0]
    assert "MULTI_CPU" not in sharded.partition("]")[0]


def fsdp2(*, precision: str = "bf16", **settings) -> SimpleNamespace:
    """Return an accelerator under FSDP2 with these settings of its plugin."""
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings), _mixed_precision=precision)
    return SimpleNamespace(is_fsdp2=True, mixed_precision=precision, state=state)


def deepspeed(zero: dict) -> SimpleNamespace:
    """Return an accelerator under DeepSpeed with this section of its config."""
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(is_fsdp2=False, state=SimpleNamespace(deepspeed_plugin=plugin))


ELSEWHERE = SimpleNamespace(is_fsdp2=False, mixed_precision="bf16", state=SimpleNamespace())


@pytest.mark.parametrize("accelerator", [ELSEWHERE, fsdp2(precision="no", forward_prefetch=False)])
def test_models_that_need_no_workaround_are_left_alone(accelerator):
    model = towers().to(torch.bfloat16)
    before = dict(model.__dict__)
    widen_unfilled_parameters(accelerator, model)
    prefetch_fsdp2_layers(accelerator, model)
    complete_zero_config(accelerator, model)
    reduce_zero_buckets_in_place(accelerator)
    drop_not_yet_unfrozen_from_zero_norm(model)
    keep_ddp_buffers_local(model)
    assert model.__dict__ == before
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert not any(unit.asks_for for unit in model.modules() if isinstance(unit, Unit))


def test_accelerate_still_takes_a_buffer_for_a_dtensor(group):
    model, state = nn.Module(), {"scale": torch.ones(2)}
    model.register_buffer("scale", torch.ones(2))
    fully_shard(model)
    with pytest.raises(AttributeError, match="device_mesh"):
        fsdp_utils.fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=True), model, state)


def test_saved_buffers_are_hidden_from_accelerate_only_meanwhile(group):
    model = nn.BatchNorm1d(2)
    with broadcast_rank_0_buffers(fsdp2(cpu_ram_efficient_loading=True), model):
        assert sorted(model.state_dict()) == ["bias", "weight"]
    assert sorted(model.state_dict()) == ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    assert model.track_running_stats


def test_accelerate_still_makes_float32_copies_under_mixed_precision():
    assert 'if accelerator.mixed_precision != "no"' in inspect.getsource(fsdp_utils.fsdp2_prepare_model)
    assert "_mixed_precision" in inspect.getsource(AcceleratorState.mixed_precision.fget)


def test_mixed_precision_is_off_only_while_a_model_is_prepared():
    accelerator = fsdp2()
    with keep_bf16_parameters(accelerator, is_wanted=False):
        assert accelerator.state._mixed_precision == "bf16"
    with pytest.raises(OSError), keep_bf16_parameters(accelerator, is_wanted=True):
        assert accelerator.state._mixed_precision == "no"
        raise OSError
    assert accelerator.state._mixed_precision == "bf16"


def test_a_package_without_the_internals_is_refused_by_its_version():
    accelerator = fsdp2()
    del accelerator.state._mixed_precision
    with pytest.raises(StrategyError, match=r"accelerate .* is not supported yet: .*_mixed_precision is missing"):
        keep_bf16_parameters(accelerator, is_wanted=True).__enter__()


def test_accelerate_still_refuses_to_prefetch_under_fsdp2():
    with pytest.raises(ValueError, match="forward_prefetch is not yet implemented in FSDP2"):
        FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)


def test_ddp_still_rebuilds_its_buckets_after_the_first_backward_pass_and_a_warm_up_has_that_done(group):
    model = DistributedDataParallel(nn.Linear(2, 1))
    rows = torch.ones(3, 2)

    def is_rebuilt() -> bool:
        return bool(model._get_ddp_logging_data().get("has_rebuilt_buckets"))

    model(rows).sum().backward()
    assert not is_rebuilt()
    accelerator = SimpleNamespace(backward=lambda loss: loss.backward())
    warm_up_ddp_buckets(accelerator, model, loss=lambda: model(rows).sum())
    assert is_rebuilt()
    assert all(parameter.grad is None for parameter in model.parameters())


class Rotary(nn.Module):
    """A layer with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("inv_freq", torch.ones(1), persistent=False)

    def forward(self, rows):
        return self.layer(rows) * self.inv_freq


def num_sent_buffers(model, monkeypatch) -> int:
    sent = []
    monkeypatch.setattr(model, "_sync_buffers", lambda: sent.append(1))
    for _ in range(3):
        model(torch.ones(3, 2)).sum().backward()
    return len(sent)


def test_ddp_still_sends_buffers_before_every_forward_pass_and_is_kept_from_it(group, monkeypatch):
    model = DistributedDataParallel(Rotary())
    assert num_sent_buffers(model, monkeypatch) == 3
    keep_ddp_buffers_local(model)
    assert num_sent_buffers(model, monkeypatch) == 0


def test_trained_parameters_without_values_are_float32_before_accelerate_casts_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    parameters = list(model.parameters())
    widen_unfilled_parameters(fsdp2(), model)
    assert [each.dtype for each in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(map(lambda one, other: one is other, parameters, model.parameters()))  # the optimizer has them


def test_transformers_still_reads_from_global_state_how_to_load():
    from transformers.integrations import deepspeed, fsdp

    assert FLAG in inspect.getsource(fsdp.is_fsdp_enabled)
    assert "_hf_deepspeed_config_weak_ref" in inspect.getsource(deepspeed.is_deepspeed_zero3_enabled)


def test_deepspeed_still_takes_half_a_billion_numbers_for_any_model():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    assert config.DeepSpeedZeroConfig().reduce_bucket_size == 500_000_000


def test_deepspeed_still_takes_its_norm_from_buffers_of_its_own():
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    assert "self.averaged_gradients[i]" in inspect.getsource(zero.DeepSpeedZeroOptimizer.scaled_global_norm)


FLAG = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def test_ranks_that_are_sent_their_weights_load_a_second_model_whole(monkeypatch):
    monkeypatch.setenv(FLAG, "true")
    with unsharded(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None))):
        assert FLAG not in os.environ
    assert os.environ[FLAG] == "true"


def test_zero_3_is_switched_on_again_even_after_an_error(monkeypatch):
    monkeypatch.delenv(FLAG, raising=False)
    calls = []
    plugin = SimpleNamespace(set_deepspeed_weakref=lambda: calls.append("on"))
    monkeypatch.setattr("finetune.strategy.upstream.unset_hf_deepspeed_config", lambda: calls.append("off"))
    with pytest.raises(OSError), unsharded(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))):
        assert calls == ["off"]
        raise OSError
    assert calls == ["off", "on"]
    assert FLAG not in os.environ


class Unit(nn.Linear, FSDPModule):
    """A layer that is told which one follows."""

    def __new__(cls, *args, **named):
        return nn.Module.__new__(cls)

    def __init__(self):
        super().__init__(2, 2)
        self.asks_for = []

    def set_modules_to_forward_prefetch(self, modules):
        self.asks_for.extend(id(each) for each in modules)


def towers():
    model = nn.Module()
    model.vision = nn.ModuleList([Unit(), Unit()])
    model.layers = nn.ModuleList([Unit(), nn.Identity(), Unit()])
    model.head = Unit()
    return model


def test_each_layer_asks_for_the_next_of_its_list():
    model = towers()
    prefetch_fsdp2_layers(fsdp2(forward_prefetch=True), model)
    assert model.vision[0].asks_for == [id(model.vision[1])]
    assert model.layers[0].asks_for == [id(model.layers[2])]
    assert not any(unit.asks_for for unit in (model.vision[1], model.layers[2], model.head))


def model_of(width: int) -> nn.Module:
    model = nn.Linear(width, width)
    model.config = SimpleNamespace(hidden_size=width)
    return model


def test_a_large_model_reduces_a_matrix_at_a_time_and_a_small_one_everything_at_once():
    assert zero_bucket_sizes(num_trained=10**10, width=4096, stage=2) == {"reduce_bucket_size": 4096 * 4096}
    assert zero_bucket_sizes(num_trained=10**8, width=512, stage=2) == {"reduce_bucket_size": MIN_BUCKET_NUMEL}
    assert zero_bucket_sizes(num_trained=1000, width=32, stage=1) == {"reduce_bucket_size": 1000}


def test_stage_3_prefetches_nearly_a_bucket_and_keeps_vectors_unsharded():
    assert zero_bucket_sizes(num_trained=10**10, width=4096, stage=3) == {
        "reduce_bucket_size": 16_777_216,
        "stage3_prefetch_bucket_size": 15_099_494,
        "stage3_param_persistence_threshold": 40_960,
    }


def test_missing_and_auto_settings_are_set_and_written_ones_kept():
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    complete_zero_config(deepspeed(zero), model_of(4))
    assert zero == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 20,
        "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 40,
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("written", [{}, {"overlap_comm": False}])
def test_zero_reduces_during_the_backward_pass_unless_the_config_turns_it_off(stage, written):
    zero = {"stage": stage, **written}
    complete_zero_config(deepspeed(zero), model_of(4))
    assert zero["overlap_comm"] is not bool(written)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_reduces_its_buckets_in_place(stage):
    accelerator = deepspeed({"stage": stage, "overlap_comm": True, "contiguous_gradients": True})
    reduce_zero_buckets_in_place(accelerator)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    assert (config["zero_optimization"]["reduce_scatter"], config["prescale_gradients"]) == (False, True)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3},
        {"stage": 2, "reduce_scatter": True},
        {"stage": 2, "use_multi_rank_bucket_allreduce": False},
        {"stage": 2, "contiguous_gradients": False},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ],
)
def test_a_config_with_its_own_gradient_reduction_is_unchanged(zero):
    accelerator = deepspeed(dict(zero))
    reduce_zero_buckets_in_place(accelerator)
    assert accelerator.state.deepspeed_plugin.deepspeed_config == {"zero_optimization": zero}


class Engine(nn.Module):
    """What is read of DeepSpeed's engine: three gradients of two groups, the second of which waits."""

    def __init__(self, **others) -> None:
        super().__init__()
        gradients = {number: [torch.ones(2)] for number in range(3)}
        groups = [{"waits": False}, {"waits": True}, {}]
        norm = lambda: sum(float(each.sum()) for some in gradients.values() for each in some)  # noqa: E731
        inner = SimpleNamespace(param_groups=groups)
        self.optimizer = SimpleNamespace(averaged_gradients=gradients, optimizer=inner, step=norm, **others)

    def zero_optimization_stage(self) -> int:
        return 2


@pytest.mark.parametrize(("others", "norm"), [({}, 4.0), ({"sub_group_to_group_id": {0: 1, 1: 1, 2: 0}}, 2.0)])
def test_a_waiting_groups_gradients_are_zero_before_the_norm_is_taken(others, norm):
    engine = Engine(**others)
    drop_not_yet_unfrozen_from_zero_norm(engine)
    assert engine.optimizer.step() == norm


def test_gradients_that_lie_elsewhere_are_refused():
    engine = Engine()
    del engine.optimizer.averaged_gradients
    with pytest.raises(StrategyError, match="not supported under DeepSpeed's SimpleNamespace"):
        drop_not_yet_unfrozen_from_zero_norm(engine)


def test_accelerate_shares_rows_through_deepspeed_alone_and_is_not_asked_to(monkeypatch):
    """Can go when Accelerate has a backend that keeps packed samples apart."""
    with pytest.raises(ValueError, match="sp_backend must be one of"):
        ParallelismConfig(sp_size=2, sp_backend="torch")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with without_accelerate_parallelism():
        assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ
        assert ParallelismConfig().sp_size == 1
    assert ParallelismConfig().sp_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "1")
    with without_accelerate_parallelism():
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true", "HSDP's sizes are read"
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with without_accelerate_parallelism():
        assert ParallelismConfig().tp_size == 1, "it would ask for a model that transformers has split"
