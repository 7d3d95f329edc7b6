"""`finetune launch skypilot`: the task of a managed job, which is recovered on another machine and resumes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.commands.launch.attempt_end import AGAIN
from finetune.commands.launch.job_files import (
    INSIST,
    Destination,
    JobFileArguments,
    check_job,
    check_options,
    deliver,
    require_files,
    require_kept,
)
from finetune.errors import UserError
from finetune.launch.jobs import PORT, JobRequest, host_script, yaml_text

SETUP = "pip install 'finetune-accelerate[s3]'\n"

_SECRETS = "Export it as a variable, and write --secret NAME: `sky jobs launch` then takes it from there."
_COMMENT = "Written by `finetune launch skypilot`. Submit it with `sky jobs launch FILE`."


@dataclass(frozen=True)
class SkypilotArguments:
    """The options of SkyPilot; None: its own default."""

    gpu: str | None = None
    bucket: tuple[str, ...] = ()  # /PATH=URL
    volume: tuple[str, ...] = ()  # /PATH=NAME
    setup: str = SETUP
    infra: str | None = None
    image: str | None = None
    spot: bool = True
    strategy: str | None = None
    disk_gb: int | None = None
    secret: tuple[str, ...] = ()  # environment variables


def launch_skypilot(arguments: JobFileArguments, sky: SkypilotArguments, destination: Destination) -> int:
    """Print, write or submit the task, and return the exit code. Raises UserError, and ConfigError for the job."""
    given = [word for name in sky.secret for word in ("--secret", name)]
    destination = replace(
        destination, command=("sky", "jobs", "launch", "--yes", *given), advice=f"{_SECRETS} {INSIST}"
    )
    check_options((arguments, sky), advice=destination.advice, allows_secrets=destination.allow_secrets)
    for name in sky.secret:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError("--secret: write the name of a variable without its value, which is read at the launch.")
    buckets = _read_mounts(
        sky.bucket, option="--bucket", pattern=r"[a-z0-9]+://[A-Za-z0-9._/-]+", example="/data=s3://my-bucket"
    )
    volumes = _read_mounts(
        sky.volume, option="--volume", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", example="/runs=my-volume"
    )
    mounted = tuple(map(Path, (*buckets, *volumes)))
    request, loaded = check_job(replace(arguments, elsewhere=mounted))
    require_kept(
        request,
        mounted,
        advice="Mount storage that all hosts can write to: --bucket /PATH=gs://BUCKET, --volume /PATH=NAME",
    )
    advice = "Run this command in the folder that contains it, which is copied, or mount it with --bucket"
    require_files(loaded, (Path.cwd(), *mounted), advice=advice)
    if not arguments.cpu and sky.gpu is None:
        raise UserError("--gpu: name the GPU of the machines, such as H100, or write --cpu.")
    config, accelerate = str(arguments.config.absolute()), str(arguments.accelerate.absolute())
    words = tuple(_in_working_folder(word) if word == config else word for word in request.job.arguments)
    job = replace(request.job, arguments=words, accelerate_file=Path(_in_working_folder(accelerate)))
    request = replace(request, job=job)
    comment = _COMMENT.replace("launch FILE", " ".join(["launch", *given, "FILE"]))
    task = _task(request, replace(sky, gpu=None if arguments.cpu else sky.gpu), buckets=buckets, volumes=volumes)
    return deliver(yaml_text([task], comment=comment), destination, name=request.name)


def _in_working_folder(path: str) -> str:
    """Return the path on the machines, to which this folder is copied. Raises UserError for a path outside of it."""
    folder = Path.cwd()
    if not Path(path).is_relative_to(folder):
        raise UserError(
            f"{path}: it is not in {folder}, the folder that SkyPilot copies to the machines. Run this command in a "
            "folder that contains the job, the accelerate file and the data. `finetune init --strategy NAME --into .` "
            "writes an accelerate file."
        )
    return f"./{Path(path).relative_to(folder)}"


def _read_mounts(texts: Sequence[str], *, option: str, pattern: str, example: str) -> dict[str, str]:
    mounts: dict[str, str] = {}
    for text in texts:
        path, _, source = text.partition("=")
        is_path = path.startswith("/") and path != "/" and path.isprintable() and "$" not in path
        if not is_path or path in mounts or not re.fullmatch(pattern, source):
            raise UserError(f"{option} {text}: write a new absolute path and the source to mount there: {example}.")
        mounts[path] = source
    return mounts


_VARIABLES = {
    "MACHINE_RANK": '"$SKYPILOT_NODE_RANK"',
    "MASTER_ADDR": '"$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"',
    "MASTER_PORT": str(PORT),
}


def _task(
    request: JobRequest, options: SkypilotArguments, *, buckets: Mapping[str, str], volumes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the task; buckets and volumes are given by the path at which they are mounted."""
    recovery: dict[str, Any] = {"recover_on_exit_codes": [AGAIN]}  # failures are counted by `finetune launch next`
    if options.strategy is not None:
        recovery["strategy"] = options.strategy
    resources: dict[str, Any] = {"use_spot": options.spot, "job_recovery": recovery}
    if options.gpu is not None:
        resources["accelerators"] = f"{options.gpu}:{request.ranks_per_node}"
    requested = {"infra": options.infra, "image_id": options.image, "disk_size": options.disk_gb}
    resources |= {name: value for name, value in requested.items() if value is not None}
    mounts = {path: {"source": url, "mode": "MOUNT"} for path, url in buckets.items()}
    return {
        "name": request.name,
        "workdir": str(Path.cwd()),
        "num_nodes": request.num_nodes,
        "resources": resources,
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": dict(volumes)} if volumes else {}),
        "envs": request.variables(),
        **({"secrets": dict.fromkeys(options.secret)} if options.secret else {}),
        "setup": options.setup if options.setup.endswith("\n") else f"{options.setup}\n",
        "run": host_script(request, _VARIABLES),
    }
