"""The connection to a Ray cluster, or to Ray started on this machine, with settings for hosts that are lost."""

import os
import socket
from typing import Any

from finetune.errors import UserError
from finetune.runtime.optional import require

WORKER_SETTINGS = {
    # How long Ray waits for the hosts of a new group of workers. When a host is lost it first asks for as many workers
    # as before, and waits for them; its default of 60 s is most of what a lost host costs.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # A worker that does not answer, on a host that is suspended or cut off; the default is 10 minutes.
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
    # Ranks of a host see all its GPUs and take that of LOCAL_RANK, as under torchrun.
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1",
    # A worker that ends would kill its rank at once; without it the kernel sends the rank SIGTERM, and it saves.
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # prints each line twice
    "RAY_DEDUP_LOGS": "0",  # would leave out lines of ranks that look alike
    "RAY_COLOR_PREFIX": "0",  # would write an escape sequence before each line
}
"""Variables of Ray Train; variables that the user has set count."""

HEAD_SETTINGS = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
"""Settings of Ray's head: after how long a host counts as lost, here 3 to 12 s, by default 15 to 60 s.

`--local` sets them. A cluster is given them when its head is started: `RAY_health_check_period_ms=1000 ... ray start`.
"""

_CONNECT_SECONDS = 10.0

LOCAL = "local"
"""The address that starts Ray on this machine."""


def connect_to_ray(
    address: str | None, *, num_cpus: int, num_gpus: int | None, purpose: str, prints_output: bool = True
) -> Any:
    """Return Ray after joining the cluster, or starting it here with these resources for LOCAL. Raises UserError.

    `prints_output`: what workers print appears here, too.
    """
    settings = {name: os.environ.get(name, value) for name, value in WORKER_SETTINGS.items()}
    os.environ.update(settings)  # Ray reads some when it is imported here
    ray = require("ray", extra="ray", purpose=purpose)
    require("ray.train", extra="ray", purpose=purpose)
    options: dict[str, Any] = {"runtime_env": {"env_vars": settings}, "log_to_driver": prints_output}
    try:
        if address is None:  # that of RAY_ADDRESS, or of this machine's cluster
            ray.init("auto", **options)
        elif address == LOCAL:
            ray.init(LOCAL, num_cpus=num_cpus, num_gpus=num_gpus, _system_config=HEAD_SETTINGS, **options)
        else:
            address = address if ":" in address else f"{address}:6379"
            if "://" not in address:  # Ray itself would try for minutes, with a line every 5 s
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = "the cluster of this machine" if address is None else address
        reason = str(error).splitlines()[0].removesuffix(".")
        raise UserError(
            f"{where}: Ray cannot be reached: {reason}. Start it with `ray start --head`, or name the host of the "
            "cluster's head."
        ) from error
    return ray
