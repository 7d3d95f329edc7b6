"""`finetune launch skypilot`: the task of a managed job, which is recovered on another machine and resumes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.job_files import Destination, JobWords, check_job, deliver, job_with, require_files
from finetune.config.paths import is_url
from finetune.errors import UserError
from finetune.launch.jobs.request import JobRequest
from finetune.launch.jobs.skypilot import SkypilotOptions, skypilot_task
from finetune.launch.jobs.yaml_text import yaml_text

SETUP = "pip install 'finetune[s3]'\n"

_COMMENT = "Written by `finetune launch skypilot`. Submit it with `sky jobs launch FILE`."


@dataclass(frozen=True)
class SkypilotWords:
    """The options that are SkyPilot's alone."""

    gpu: str | None = None
    bucket: tuple[str, ...] = ()  # /PATH=URL
    setup: str = SETUP
    infra: str | None = None
    image: str | None = None
    spot: bool = True
    strategy: str | None = None
    disk_gb: int | None = None


def launch_skypilot(words: JobWords, sky: SkypilotWords, destination: Destination) -> int:
    """Print, write or submit the task, and return the exit code. Raises UserError, and ConfigError for the job."""
    buckets = _read_buckets(sky.bucket)
    mounted = tuple(map(Path, buckets))
    request, loaded = check_job(replace(words, elsewhere=mounted))
    _require_bucket(request, buckets)
    require_files(
        loaded, (Path.cwd(), *mounted), advice="Run this in the folder that has it, or mount it with --bucket"
    )
    if not words.cpu and sky.gpu is None:
        raise UserError("--gpu: name the GPU of the machines, such as H100, or write --cpu.")
    copied = {word: _in_working_folder(word) for word in (str(words.config.absolute()),)}
    request = job_with(
        request, words=copied, accelerate_file=Path(_in_working_folder(str(words.accelerate.absolute())))
    )
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
    )
    text = yaml_text([skypilot_task(request, options)], comment=_COMMENT)
    return deliver(text, replace(destination, command=("sky", "jobs", "launch", "--yes")), name=request.name)


def _in_working_folder(path: str) -> str:
    """Return the path on the machines, to which this folder is copied. Raises UserError for one outside of it."""
    here = Path.cwd()
    if not Path(path).is_relative_to(here):
        raise UserError(
            f"{path}: it is not in {here}, the folder that SkyPilot copies to the machines. Run this command in a "
            "folder that has the job, the accelerate file and the data."
        )
    return f"./{Path(path).relative_to(here)}"


def _read_buckets(texts: Sequence[str]) -> dict[str, str]:
    """Return the bucket of each path; raises UserError."""
    buckets: dict[str, str] = {}
    for text in texts:
        path, mark, url = text.partition("=")
        if not mark or not path.startswith("/") or not path.isprintable() or "$" in text or not is_url(url):
            raise UserError(f"--bucket {text}: write /PATH=URL, such as /checkpoints=s3://my-bucket.")
        if not re.fullmatch(r"[a-z0-9]+://[A-Za-z0-9._/-]+", url) or path in buckets:
            raise UserError(f"--bucket {text}: write the URL of a bucket, and each path once.")
        buckets[path] = url
    return buckets


def _require_bucket(request: JobRequest, buckets: dict[str, str]) -> None:
    """Raise UserError for a run folder that is gone with its machine."""
    if not request.is_at_url and not any(Path(request.run_folder).is_relative_to(path) for path in buckets):
        raise UserError(
            f"run.folder: {request.run_folder} is on the machine alone, and is lost with it. Write a URL, "
            "--set run.folder=s3://BUCKET/NAME, or mount a bucket with --bucket /PATH=s3://BUCKET."
        )
