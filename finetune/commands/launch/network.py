"""Settings of NCCL and gloo that follow from the facts of `finetune doctor --json`."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from finetune.commands.doctor.checks import Facts, HostFacts, check_facts
from finetune.commands.doctor.network import InfinibandPort

ACTIVE = "ACTIVE"

_ELASTIC_FABRIC = ("efa", "rdmap")
"""Prefixes of AWS's Elastic Fabric Adapters, which the kernel lists as InfiniBand and NCCL cannot use as such."""

_WITHOUT_P2P = ("no-p2p", "p2p-iommu")
"""Findings after which NCCL must not copy between GPUs directly: it would hang, or sums would be wrong."""

T = TypeVar("T")


def network_variables(facts: Facts, *, num_nodes: int) -> dict[str, str]:
    """Return the variables that the ranks of such hosts need; empty where the defaults of NCCL and gloo are right."""
    variables: dict[str, str] = {}
    if num_nodes > 1:
        variables |= _interfaces(facts) | _adapters(facts)
    if any(finding.key in _WITHOUT_P2P for finding in check_facts(facts)):
        variables["NCCL_P2P_DISABLE"] = "1"
    return variables


def _interfaces(facts: Facts) -> dict[str, str]:
    """Return the interface of the default route, where it has the same name on all hosts."""
    name = _same_everywhere(facts, lambda host: host.network.default_interface)
    if name is None:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}


def _adapters(facts: Facts) -> dict[str, str]:
    """Return the setting that limits NCCL to usable InfiniBand ports; by default it uses all of them."""
    if any(port.device.startswith(_ELASTIC_FABRIC) for host in facts.hosts for port in host.network.infiniband):
        return {"FI_PROVIDER": "efa"}
    if not any(host.network.infiniband for host in facts.hosts):
        return {}
    if not all(_usable(host.network.infiniband) for host in facts.hosts):
        return {"NCCL_IB_DISABLE": "1"}  # a host has none: all of them use TCP
    chosen = _same_everywhere(facts, lambda host: _usable(host.network.infiniband))
    has_others = any(len(_usable(host.network.infiniband)) < len(host.network.infiniband) for host in facts.hosts)
    return {"NCCL_IB_HCA": f"={','.join(chosen)}"} if chosen is not None and has_others else {}


def _usable(ports: Iterable[InfinibandPort]) -> tuple[str, ...]:
    """Return the ports with a link; where some are of InfiniBand, only those: others are for storage or ssh."""
    active = [port for port in ports if port.state == ACTIVE]
    fast = [port for port in active if port.link_layer == "InfiniBand"] or active
    return tuple(f"{port.device}:{port.port}" for port in fast)


def _same_everywhere(facts: Facts, of: Callable[[HostFacts], T | None]) -> T | None:
    values = {of(host) for host in facts.hosts}
    return values.pop() if len(values) == 1 else None
