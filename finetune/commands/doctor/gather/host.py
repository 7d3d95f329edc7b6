"""All facts of this machine."""

import dataclasses
import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from finetune.commands.doctor.facts.host import HostFacts
from finetune.commands.doctor.gather.gpus import gather_gpus
from finetune.commands.doctor.gather.network import gather_hub, gather_network
from finetune.commands.doctor.gather.software import gather_software, gather_variables
from finetune.commands.doctor.gather.storage import gather_storage
from finetune.commands.doctor.gather.system import gather_system
from finetune.commands.doctor.gather.tools import gather_all
from finetune.commands.doctor.gather.topology import read_topology

SECONDS = 30.0
"""After which a gatherer is given up: a driver that hangs does not answer at all."""


def gather_host(places: Mapping[str, Path], *, variables: Mapping[str, str]) -> HostFacts:
    """Return the facts of this machine; `places` are the folders that a run would write to.

    `variables` is the environment as the process was given it.
    """
    found, unread = gather_all(
        {
            "system": gather_system,
            "gpus": gather_gpus,
            "network": gather_network,
            "hub": partial(gather_hub, variables),
            "storage": partial(gather_storage, places),
            "software": gather_software,
        },
        seconds=SECONDS,
    )
    hub = found.pop("hub", None)
    facts = HostFacts(platform.node(), variables=gather_variables(variables), **found)
    facts = dataclasses.replace(facts, network=dataclasses.replace(facts.network, hub=hub))
    if len(facts.gpus.gpus) > 1:
        topology, late = gather_all({"topology": read_topology}, seconds=SECONDS)
        facts = dataclasses.replace(facts, gpus=dataclasses.replace(facts.gpus, **topology))
        unread += late
    return dataclasses.replace(facts, unread=tuple(unread))
