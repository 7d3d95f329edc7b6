"""Which GPUs a plan is for."""

from collections.abc import Callable

import pytest

from finetune.commands.plan.hardware import COMMON_HARDWARE, own_hardware, parse_hardware
from finetune.commands.plan.plan import PlanOptions, choose_machines
from finetune.errors import UserError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "nodes", "name", "per_node", "num_nodes"),
    [
        ("8xH100-80GB", None, "H100-80GB", 8, 1),
        ("8xH100-80GB", 2, "H100-80GB", 8, 2),
        ("T4", None, "T4", 1, 1),
        ("2 x RTX 4090", None, "RTX4090", 2, 1),
        ("64xA100-40GB", None, "A100-40GB", 8, 8),
        ("4*mi300x", 3, "MI300X", 4, 3),
    ],
)
def test_a_text_names_hardware(text: str, nodes: int | None, name: str, per_node: int, num_nodes: int):
    found = parse_hardware(text, num_nodes=nodes)
    assert (found.gpu.name, found.gpus_per_node, found.num_nodes) == (name, per_node, num_nodes)


@pytest.mark.parametrize("text", ["0xT4", "", "99999999999xT4", "12xH100", "8xH100-82GB"])
def test_a_text_that_is_not_a_machine_is_refused_with_one_message(text: str):
    with refused(UserError):
        parse_hardware(text, num_nodes=None)


def test_the_network_bandwidth_comes_from_the_option_or_the_table():
    """8 GPUs share 100 Gbit/s: 1.5625 GB/s each."""
    assert parse_hardware("8xH100", num_nodes=2).gpu.network_bandwidth == 50e9
    assert parse_hardware("8xH100", num_nodes=2, network_gbit=100).gpu.network_bandwidth == 100e9 / 8 / 8


def test_the_gpus_of_this_machine_are_taken_with_their_own_memory(gpus: Callable[..., None]):
    gpus("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", memory=79 << 30)
    found = own_hardware(num_nodes=None, gpu_table=None)
    assert found is not None
    assert (found.gpu.name, found.gpus_per_node, found.gpu.memory_bytes) == ("A100-80GB", 2, 79 << 30)


def test_gpus_that_are_in_no_table_or_of_several_kinds_are_refused(gpus: Callable[..., None]):
    gpus("NVIDIA GeForce GT 710")
    with refused(UserError, "710,", "--gpus"):
        own_hardware(num_nodes=None, gpu_table=None)
    gpus("Tesla T4", "NVIDIA L4")
    with refused(UserError):
        own_hardware(num_nodes=None, gpu_table=None)


@pytest.mark.usefixtures("no_gpu")
def test_plan_without_a_gpu_uses_common_hardware_and_reports_it():
    found, sentences = choose_machines(PlanOptions())
    assert [f"{each.gpus_per_node}x{each.gpu.name}" for each in found] == list(COMMON_HARDWARE)
    assert "has no GPU" in sentences[0] and "--gpus" in sentences[0]
