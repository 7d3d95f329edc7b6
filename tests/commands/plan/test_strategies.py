"""Which strategy is taken: on three machines where an engineer knows the answer, and where a job forbids some."""

from collections.abc import Callable

import pytest

from finetune.commands.plan.hardware import parse_hardware
from finetune.commands.plan.output import Plan
from finetune.commands.plan.strategies import StrategyPlan, accelerate_file, largest_fit
from finetune.memory.state import Prediction, TrainingLayout
from tests.commands.plan.estimates import LlamaEstimate

Planned = Callable[..., Plan]


def by_name(plan: Plan) -> dict[str, StrategyPlan]:
    return {each.strategy: each for each in plan.machines[0].plans}


def test_8b_full_on_8xh100_is_sharded(planned: Planned):
    """16 bytes per parameter are 128 GB: too much for one GPU, 16 GB each when eight share them."""
    plan = planned("8b", gpus="8xH100-80GB")
    best, found = plan.machines[0].best, by_name(plan)
    assert best is not None and best.strategy == "fsdp2"
    assert not found["ddp"].fits and found["ddp"].reason == "out of memory with one sample"
    assert found["zero3"].fits and found["zero2"].fits
    assert best.layout.microbatch_size * best.num_microbatches * 8 == 64
    assert plan.machines[0].why.startswith("fsdp2: single, ddp would run out of memory")


def test_125m_on_one_t4_takes_one_process_and_the_whole_batch_at_once(planned: Planned):
    plan = planned("125m", gpus="1xT4")
    best = plan.machines[0].best
    assert best is not None and best.strategy == "single" and best.layout.microbatch_size == 64
    assert by_name(plan)["ddp"].reason == "for several GPUs"
    assert any("T4 has no bf16 units" in sentence for sentence in plan.assumptions)


def test_products_in_8_bits_are_faster_under_the_strategies_that_have_them(planned: Planned):
    half, eighth = (planned("8b", f"train.precision={name}", gpus="8xH100") for name in ("bf16", "fp8"))
    times = [by_name(plan)["fsdp2"].time for plan in (half, eighth)]
    assert times[0] is not None and times[1] is not None
    assert 0.7 < times[1].seconds / times[0].seconds < 0.9
    assert "fp8 does not work under ZeRO" in str(by_name(eighth)["zero3"].reason)
    old = planned("8b", "train.precision=fp8", gpus="8xA100-80GB")
    assert any("A100-80GB has no fp8 units: a run is refused there" in sentence for sentence in old.assumptions)


@pytest.mark.parametrize(("length", "largest"), [(1_000_000, 2), (4_000_000, 1)])
def test_a_microbatch_of_several_million_tokens_is_never_traced(planned: Planned, length: int, largest: int):
    sizes = []

    def predict(layout: TrainingLayout) -> Prediction:
        sizes.append(layout.microbatch_size)
        return LlamaEstimate(1_000_000, 1, 64, length=length)(layout)

    plan = planned("125m", f"data.max_length={length}", gpus="1xH100-80GB", predict=predict)
    assert plan.machines[0].best is not None and max(sizes) == largest


def test_over_a_slow_network_copies_of_a_machines_shards_are_faster(planned: Planned):
    """Gathering 16 GB of weights twice a microbatch over 10 Gbit/s is not hidden by anything."""
    plan = planned("8b", "train.global_batch_size=4096", gpus="8xH100", num_nodes=4, network_gbit=10)
    hsdp, fsdp2 = (by_name(plan)[name].time for name in ("hsdp", "fsdp2"))
    assert hsdp is not None and fsdp2 is not None and hsdp.seconds < 0.7 * fsdp2.seconds
    best = plan.machines[0].best
    assert best is not None and best.strategy in ("hsdp", "zero1")
    assert accelerate_file("hsdp", plan.machines[0].hardware) == "accelerate_configs/multi_node_hsdp.yaml"


def test_a_run_that_is_long_enough_is_planned_compiled(planned: Planned):
    """64 samples of 4,096 tokens on 8 GPUs: a step of a rank saves 0.48 s of its memory's time with recomputation."""

    def fsdp2(*overrides: str):
        machine = planned("8b", "model.kernels=none", *overrides, gpus="8xH100").machines[0]
        return {plan.strategy: plan for plan in machine.plans}

    off, short, long = (fsdp2(*each)["fsdp2"] for each in ([], ["model.compile=auto", "train.steps=200"], _LONG))
    assert off.time is not None and short.time is not None and long.time is not None
    assert off.compilation is None and short.compilation is not None and not short.compilation.pays
    assert short.time.seconds == off.time.seconds
    assert long.compilation is not None and long.compilation.pays
    assert off.time.seconds - long.time.seconds == pytest.approx(long.compilation.saved_seconds / 2000, rel=0.02)
    liger = fsdp2(*_LONG, "model.kernels=liger")["fsdp2"]
    assert liger.compilation is None and liger.time is not None and liger.time.seconds == long.time.seconds
    zero3 = fsdp2(*_LONG)["zero3"]
    assert zero3.compilation is None and zero3.time is not None and zero3.time.seconds > long.time.seconds


_LONG = ("model.compile=auto", "train.steps=2000")


def test_a_batch_that_cannot_be_shared_is_the_reason(planned: Planned):
    plan = planned("8b", "train.global_batch_size=12", "run.strategy=fsdp2", "model.kernels=liger", gpus="8xH100")
    assert plan.machines[0].best is None
    assert by_name(plan)["fsdp2"].reason == "train.global_batch_size 12 cannot be shared by 8 GPUs"


def test_a_strategy_set_in_the_job_limits_the_plan(planned: Planned):
    found = by_name(planned("8b", "train.optimizer.name=muon", gpus="8xH100"))
    assert found["zero3"].prediction is None and "muon needs whole matrices" in str(found["zero3"].reason)
    assert found["fsdp2"].fits
    only = by_name(planned("8b", "run.strategy=zero2", gpus="8xH100"))
    assert [name for name, each in only.items() if each.fits] == ["zero2", "zero2_offload"]


@pytest.mark.parametrize(
    ("strategy", "nodes", "file"),
    [
        ("fsdp2", 1, "fsdp2"),
        ("fsdp2", 2, "multi_node_fsdp2"),
        ("zero2", 2, "zero2"),
        ("zero3", 2, "multi_node_zero3"),
        ("zero3_offload", 1, "zero3_offload"),
    ],
)
def test_the_accelerate_file_exists(strategy: str, nodes: int, file: str, pytestconfig: pytest.Config):
    name = accelerate_file(strategy, parse_hardware("8xH100", num_nodes=nodes))
    assert name == f"accelerate_configs/{file}.yaml"
    assert (pytestconfig.rootpath / name).is_file()


LAYOUT = TrainingLayout("fsdp2", 8, "full", False, 1)


def test_the_largest_fitting_size_is_searched_by_linear_interpolation():
    """10 + 3 n <= 40: 10 samples, of the sizes 8; one step above it is tried, too."""
    asked = []

    def predict(layout: TrainingLayout) -> Prediction:
        asked.append(layout.microbatch_size)
        size = 10 + 3 * layout.microbatch_size
        return Prediction(size, {"activations": size})

    assert largest_fit(predict, LAYOUT, usable_bytes=40, sizes=(1, 2, 4, 8, 16, 32, 64)) == 8
    assert asked == [1, 64, 8, 16]
    assert largest_fit(predict, LAYOUT, usable_bytes=5, sizes=(1, 2)) is None


def test_where_there_are_fewer_samples_than_gpus_groups_of_gpus_share_layers(planned: Planned):
    """4 samples on 8 GPUs: no rank of FSDP2 may be without one; four groups of two have one each."""
    plan = planned("8b", "train.global_batch_size=4", "model.dtype=bfloat16", gpus="8xH100-80GB")
    best, found = plan.machines[0].best, by_name(plan)
    assert found["fsdp2"].reason == "train.global_batch_size 4 cannot be shared by 8 GPUs"
    assert best is not None and best.strategy == "fsdp2_tensor_parallel"
    assert (best.layout.tensor_size, best.num_microbatches * best.layout.microbatch_size) == (2, 1)
    assert "Groups of 2 GPUs share every layer and a microbatch (`parallelism_config_tp_size: 2`)" in (
        plan.machines[0].why
    )
    assert found["tensor_parallel"].fits and found["tensor_parallel"].layout.tensor_size == 8


def test_tensor_parallelism_is_not_planned_where_another_strategy_runs_or_the_job_does_not_allow_it(planned: Planned):
    assert "tensor_parallel" not in by_name(planned("8b", gpus="8xH100-80GB"))
    refused = by_name(planned("8b", "train.global_batch_size=4", "model.kernels=liger", gpus="8xH100-80GB"))
    assert "model.kernels" in str(refused["tensor_parallel"].reason)
    heads = ["model.from_config.values.num_key_value_heads=1", "train.global_batch_size=4"]
    assert "num_key_value_heads is 1" in str(by_name(planned("8b", *heads, gpus="8xH100"))["tensor_parallel"].reason)
