"""`finetune launch skypilot`: the task of a managed job, which is recovered on another machine and resumes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.contents import INSIST, check_options
from finetune.commands.launch.job_files import (
    Destination,
    JobFileArguments,
    check_job,
    deliver,
    job_with,
    require_files,
    require_kept,
)
from finetune.errors import UserError
from finetune.launch.jobs.skypilot import SkypilotOptions, skypilot_task
from finetune.launch.jobs.yaml_text import yaml_text

SETUP = "pip install 'finetune[s3]'\n"

_SECRETS = "Export it as a variable, and write --secret NAME: `sky jobs launch` then takes it from there."
_COMMENT = "Written by `finetune launch skypilot`. Submit it with `sky jobs launch FILE`."


@dataclass(frozen=True)
class SkypilotArguments:
    """The options that are SkyPilot's alone."""

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


def launch_skypilot(words: JobFileArguments, sky: SkypilotArguments, destination: Destination) -> int:
    """Print, write or submit the task, and return the exit code. Raises UserError, and ConfigError for the job."""
    given = [word for name in sky.secret for word in ("--secret", name)]
    destination = replace(
        destination, command=("sky", "jobs", "launch", "--yes", *given), advice=f"{_SECRETS} {INSIST}"
    )
    check_options((words, sky), advice=destination.advice, allows_secrets=destination.allow_secrets)
    _require_names(sky.secret)
    buckets = _read_mounts(
        sky.bucket, option="--bucket", what=r"[a-z0-9]+://[A-Za-z0-9._/-]+", example="/data=s3://my-bucket"
    )
    volumes = _read_mounts(sky.volume, option="--volume", what=r"[A-Za-z0-9][A-Za-z0-9._-]*", example="/runs=my-volume")
    mounted = tuple(map(Path, (*buckets, *volumes)))
    request, loaded = check_job(replace(words, elsewhere=mounted))
    require_kept(
        request, mounted, advice="Mount what all hosts can write: --bucket /PATH=gs://BUCKET, --volume /PATH=NAME"
    )
    advice = "Run this in the folder that has it, which is copied, or mount it with --bucket"
    require_files(loaded, (Path.cwd(), *mounted), advice=advice)
    if not words.cpu and sky.gpu is None:
        raise UserError("--gpu: name the GPU of the machines, such as H100, or write --cpu.")
    config, accelerate = str(words.config.absolute()), str(words.accelerate.absolute())
    copied = {config: _in_working_folder(config)}
    request = job_with(request, words=copied, accelerate_file=Path(_in_working_folder(accelerate)))
    options = SkypilotOptions(
        working_folder=str(Path.cwd()),
        gpu=None if words.cpu else sky.gpu,
        setup=sky.setup if sky.setup.endswith("\n") else f"{sky.setup}\n",
        infra=sky.infra,
        image=sky.image,
        is_spot=sky.spot,
        strategy=sky.strategy,
        disk_gb=sky.disk_gb,
        buckets=buckets,
        volumes=volumes,
        secrets=sky.secret,
    )
    comment = _COMMENT.replace("launch FILE", " ".join(["launch", *given, "FILE"]))
    return deliver(yaml_text([skypilot_task(request, options)], comment=comment), destination, name=request.name)


def _require_names(variables: Sequence[str]) -> None:
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(
                "--secret: write the name of a variable without its value, which is read when it is launched."
            )


def _in_working_folder(path: str) -> str:
    """Return the path on the machines, to which this folder is copied. Raises UserError for one outside of it."""
    here = Path.cwd()
    if not Path(path).is_relative_to(here):
        raise UserError(
            f"{path}: it is not in {here}, the folder that SkyPilot copies to the machines. Run this command in a "
            "folder that has the job, the accelerate file and the data. `finetune init --strategy NAME --into .` "
            "writes an accelerate file."
        )
    return f"./{Path(path).relative_to(here)}"


def _read_mounts(texts: Sequence[str], *, option: str, what: str, example: str) -> dict[str, str]:
    mounts: dict[str, str] = {}
    for text in texts:
        path, _, source = text.partition("=")
        is_path = path.startswith("/") and path != "/" and path.isprintable() and "$" not in path
        if not is_path or path in mounts or not re.fullmatch(what, source):
            raise UserError(f"{option} {text}: write an absolute path, once, and what is mounted there: {example}.")
        mounts[path] = source
    return mounts
