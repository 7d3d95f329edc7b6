"""The strategy that was launched is chosen, or refused with the reason."""

import pytest
import torch

from finetune.errors import StrategyError
from finetune.strategy.choose import choose_strategy, describe_strategy
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.protocol import Sharded
from finetune.strategy.reconcile import JobSettings, complete_deepspeed_config
from tests.refusals import refused

JOB = JobSettings(strategy=None, precision="fp32", microbatch_size=4, max_gradient_norm=1.0)


def launched(**changes):
    return LaunchEnvironment(**{"world": 2, **changes})


@pytest.mark.parametrize(
    ("environment", "name", "sharded"),
    [
        (launched(world=1), "single", set()),
        (launched(), "ddp", set()),
        (launched(world=1, has_process_group=True), "ddp", set()),
        (launched(is_fsdp=True), "fsdp2", set(Sharded)),
        (launched(world=4, is_fsdp=True, replicate_size=2, shard_size=2), "hsdp", set(Sharded)),
        (launched(zero_stage=1), "zero1", {Sharded.OPTIMIZER}),
        (launched(zero_stage=2), "zero2", {Sharded.OPTIMIZER, Sharded.GRADIENTS}),
        (launched(zero_stage=3), "zero3", set(Sharded)),
    ],
)
def test_each_launch_has_its_strategy(environment, name, sharded):
    strategy = choose_strategy(environment, JOB)
    assert strategy.name == name
    assert strategy.sharded == sharded
    assert strategy.expected.num_processes == environment.world


def test_a_strategy_explains_itself():
    assert describe_strategy(choose_strategy(launched(zero_stage=2), JOB)) == (
        "zero2 on 2 processes splits gradients and optimizer state, copies parameters"
    )


@pytest.mark.parametrize("kind", [{}, {"is_fsdp": True}, {"zero_stage": 3}])
def test_processes_that_share_rows_are_described_and_compute_fewer_microbatches_at_a_time(kind):
    strategy = choose_strategy(launched(world=8, sequence_size=4, **kind), JOB)
    assert describe_strategy(strategy).endswith("shares sequences over groups of 4")
    assert (strategy.expected.num_processes, strategy.expected.data_parallel_size) == (8, 2)


def test_copies_and_shards_and_rows_make_up_the_processes():
    sizes = {"world": 8, "is_fsdp": True, "replicate_size": 2, "sequence_size": 2}
    assert choose_strategy(launched(**sizes, shard_size=2), JOB).expected.num_shards == 4


@pytest.mark.parametrize(
    ("sizes", "world", "fact"),
    [
        ({"replicate_size": 2, "shard_size": 4, "sequence_size": 2}, 8, "is for 16 processes, and 8 were started"),
        ({"replicate_size": 2, "shard_size": 2}, 6, "dp_replicate_size: 2 x dp_shard_size: 2"),
        ({"tensor_size": 2}, 3, "tp_size: 2"),
        ({"sequence_size": 0}, 8, "sp_size: 0"),
        ({"sequence_size": 3}, 8, "sp_size: 3"),
        ({"sequence_size": 16}, 8, "sp_size: 16"),
    ],
)
def test_sizes_that_do_not_make_up_the_processes_are_refused(sizes, world, fact):
    with refused(StrategyError, "parallelism_config: ", fact):
        choose_strategy(launched(world=world, is_fsdp="shard_size" in sizes, **sizes), JOB)


def test_a_group_of_processes_that_share_layers_computes_one_microbatch():
    strategy = choose_strategy(launched(world=2, tensor_size=2), JOB)
    assert describe_strategy(strategy) == "tp on 2 processes splits parameters, gradients and optimizer state"
    assert (strategy.expected.num_processes, strategy.expected.data_parallel_size) == (2, 1)
    strategy = choose_strategy(launched(world=6, tensor_size=2), JOB)
    assert describe_strategy(strategy).endswith("and optimizer state, shares layers over groups of 2")
    assert (strategy.expected.num_shards, strategy.expected.data_parallel_size) == (2, 3)


def test_fsdp2_shards_over_groups_that_share_layers():
    sizes = {"world": 8, "is_fsdp": True, "tensor_size": 2}
    strategy = choose_strategy(launched(**sizes), JOB)
    assert describe_strategy(strategy).endswith("and optimizer state, shares layers over groups of 2")
    assert (strategy.expected.num_shards, strategy.expected.data_parallel_size) == (8, 4)
    strategy = choose_strategy(launched(**sizes, replicate_size=2, shard_size=2), JOB)
    assert strategy.name == "hsdp"
    assert (strategy.expected.num_shards, strategy.expected.data_parallel_size) == (4, 4)


def test_weights_that_are_elsewhere_are_not_split():
    environment = launched(world=4, has_device=True, is_fsdp=True, tensor_size=2, fsdp_offload_params=True)
    with refused(StrategyError, "fsdp_offload_params", "tp_size: 2"):
        choose_strategy(environment, JOB)


@pytest.mark.parametrize("sizes", [{"world": 2}, {"world": 4, "is_fsdp": True, "cpu_ram_efficient_loading": True}])
def test_only_rank_0_of_ranks_that_split_layers_loads_weights(sizes):
    for rank in range(sizes["world"]):
        strategy = choose_strategy(launched(**sizes, rank=rank, tensor_size=2), JOB)
        assert strategy.init_context(torch.device("cpu")).on_meta_device == (rank > 0)


@pytest.mark.parametrize(
    "other",
    [
        {"world": 4, "replicate_size": 4},
        {"world": 2, "is_fsdp": True},
        {"world": 4, "is_fsdp": True, "replicate_size": 2},
        {"world": 4, "is_fsdp": True, "sequence_size": 2},
        {"world": 2, "zero_stage": 1},
        {"world": 2, "sequence_size": 2},
    ],
)
def test_tensor_parallelism_next_to_another_kind_is_refused(other):
    with refused(StrategyError, "tp_size: 2"):
        choose_strategy(launched(**other, tensor_size=2), JOB)


def test_fsdp_requested_and_ddp_launched_is_rejected_with_the_command_to_use():
    job = JobSettings(strategy="fsdp2", precision="fp32", microbatch_size=4, max_gradient_norm=1.0)
    with refused(StrategyError, "run.strategy", "fsdp2.yaml"):
        choose_strategy(launched(), job)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "bf16"}, "mixed_precision"),
        ({"is_fsdp": True, "fsdp_activation_checkpointing": True}, ""),
        ({"is_fsdp": True, "fsdp_offload_params": True}, "fsdp_offload_params"),
        ({"unsupported": ("tensor parallelism: why",)}, ""),
        ({"zero_stage": 0}, ""),
        ({"zero_stage": 2, "deepspeed": {"gradient_clipping": 0.5}}, "gradient_clipping: 0.5,"),
        ({"zero_stage": 2, "deepspeed": {"train_micro_batch_size_per_gpu": 8}}, ""),
        ({"zero_stage": 2, "deepspeed": {"optimizer": {"type": "Adam"}}}, "`optimizer`"),
        ({"zero_stage": 2, "deepspeed": {"bf16": {"enabled": True}}}, "bf16.enabled"),
    ],
)
def test_disagreements_of_job_and_accelerate_config_are_named(changes, message):
    with refused(StrategyError, message):
        choose_strategy(launched(**changes), JOB)


def test_all_disagreements_are_reported_at_once():
    with refused(StrategyError, "2 points"):
        choose_strategy(launched(precision="bf16", is_fsdp=True, fsdp_activation_checkpointing=True), JOB)


def test_an_offloaded_optimizer_must_be_adamw():
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    job = JobSettings(strategy=None, precision="fp32", microbatch_size=4, max_gradient_norm=1.0, optimizer="sgd")
    with refused(StrategyError, "DeepSpeedCPUAdam"):
        choose_strategy(launched(zero_stage=2, deepspeed=offload), job)


@pytest.mark.parametrize(
    ("environment", "wish"),
    [
        ({"zero_stage": 2}, {"averages_weights": True}),
        ({"zero_stage": 3}, {"unfreezes_later": True}),
        ({"zero_stage": 2}, {"optimizer": "muon"}),
        ({"is_fsdp": True}, {"optimizer": "paged_adamw"}),
        ({"zero_stage": 2}, {"optimizer": "adamw_4bit"}),
    ],
)
def test_an_optimizer_unsupported_by_the_strategy_is_rejected(environment, wish):
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if "zero_stage" in environment else {}
    job = JobSettings(strategy=None, precision="fp32", microbatch_size=4, max_gradient_norm=1.0, **wish)
    with refused(StrategyError):
        choose_strategy(launched(**environment, deepspeed=offload), job)


def test_deepspeed_clipping_is_disabled_without_a_maximum_norm():
    job = JobSettings(strategy=None, precision="bf16", microbatch_size=4, max_gradient_norm=None)
    filled = complete_deepspeed_config({"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}, world=2, job=job)
    assert filled["gradient_clipping"] == 0.0
    assert filled["train_batch_size"] == 8
    assert filled["gradient_accumulation_steps"] == 1
    assert filled["bf16"] == {"enabled": True, "check_grad_overflow": True}


def test_pinned_memory_without_a_gpu_is_a_key_without_effect():
    job = JobSettings(strategy=None, precision="fp32", microbatch_size=4, max_gradient_norm=1.0, pins_memory=True)
    with refused(StrategyError, "data.pin_memory"):
        choose_strategy(launched(), job)
    assert choose_strategy(launched(has_device=True), job).name == "ddp"


PLAIN = {"strategy": None, "precision": "fp32", "microbatch_size": 4, "max_gradient_norm": None}


def test_offloaded_activations_without_a_gpu_are_a_key_without_effect():
    with refused(StrategyError, "model.activation_offload"):
        choose_strategy(launched(), JobSettings(**PLAIN, offloads_activations=True))


@pytest.mark.parametrize("elsewhere", [{"world": 2}, {"is_fsdp": True}, {"zero_stage": 1}])
def test_an_update_within_the_backward_pass_is_for_one_process(elsewhere):
    job = JobSettings(**PLAIN, updates_in_backward=True)
    with refused(StrategyError, "in_backward"):
        choose_strategy(launched(**elsewhere), job)
    assert choose_strategy(launched(world=1), job).name == "single"


def test_rounding_by_rows_needs_rows():
    job = JobSettings(**PLAIN, rounds_by_position=True)
    with refused(StrategyError, "fsdp2.yaml"):
        choose_strategy(launched(zero_stage=2), job)
    assert choose_strategy(launched(is_fsdp=True), job).name == "fsdp2"
