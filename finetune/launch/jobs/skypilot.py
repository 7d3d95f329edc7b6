"""The task of a managed job of SkyPilot: on spot machines it is recovered, and resumes from its bucket."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.launch.jobs.decision import AGAIN
from finetune.launch.jobs.host_script import host_script
from finetune.launch.jobs.request import PORT, JobRequest

_MEETING = {
    "MACHINE_RANK": '"$SKYPILOT_NODE_RANK"',
    "MASTER_ADDR": '"$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"',
    "MASTER_PORT": str(PORT),
}


@dataclass(frozen=True)
class SkypilotOptions:
    """What SkyPilot is asked for; None: left to it."""

    working_folder: str  # copied to the machines, and where the job runs
    gpu: str | None  # H100
    setup: str
    infra: str | None = None  # aws, gcp/us-central1
    image: str | None = None
    is_spot: bool = True
    strategy: str | None = None
    disk_gb: int | None = None
    buckets: Mapping[str, str] = field(default_factory=dict)  # path on the machines -> URL of the bucket
    volumes: Mapping[str, str] = field(default_factory=dict)  # path on the machines -> name of the volume
    secrets: tuple[str, ...] = ()  # variables whose values SkyPilot is given when the task is launched


def skypilot_task(request: JobRequest, options: SkypilotOptions) -> dict[str, Any]:
    """Return the task."""
    recovery: dict[str, Any] = {"recover_on_exit_codes": [AGAIN]}  # failures are counted by `finetune launch next`
    if options.strategy is not None:
        recovery["strategy"] = options.strategy
    resources: dict[str, Any] = {"use_spot": options.is_spot, "job_recovery": recovery}
    if options.gpu is not None:
        resources["accelerators"] = f"{options.gpu}:{request.ranks_per_node}"
    requested = {"infra": options.infra, "image_id": options.image, "disk_size": options.disk_gb}
    resources |= {name: value for name, value in requested.items() if value is not None}
    mounts = {path: {"source": url, "mode": "MOUNT"} for path, url in options.buckets.items()}
    return {
        "name": request.name,
        "workdir": options.working_folder,
        "num_nodes": request.num_nodes,
        "resources": resources,
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": dict(options.volumes)} if options.volumes else {}),
        "envs": request.variables(),
        **({"secrets": dict.fromkeys(options.secrets)} if options.secrets else {}),
        "setup": options.setup,
        "run": host_script(request, _MEETING),
    }
