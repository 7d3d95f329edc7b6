"""`finetune launch kubernetes`: a JobSet, with the job's files in a ConfigMap."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.job_files import (
    JobFileArguments,
    check_job,
    check_options,
    check_text,
    deliver,
    read_pairs,
)
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.config.load import LoadedConfig, read_text_file
from finetune.config.rules.files import read_paths
from finetune.errors import UserError
from finetune.launch.jobs import PORT, JobRequest, host_script, render
from finetune.runtime.text.redact import redacted_yaml

_FINAL_CODES = [1, 2, 126, 127, 130]
"""Exit codes without a restart: `finetune launch next` decided so, or the program does not exist."""

_DECIDING_SECONDS = 30
"""Time after the save for the decision whether to restart."""

_RESOURCE = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_SECRETS = (
    "Create it with `kubectl create secret generic NAME --from-literal=KEY=...`, and write --secret NAME for variables "
    "of all its keys, or --secret VARIABLE=NAME:KEY for one (`secretKeyRef`)."
)


@dataclass(frozen=True)
class KubernetesArguments:
    """The options of Kubernetes, as they are typed."""

    image: str
    namespace: str | None = None
    claim: tuple[str, ...] = ()  # CLAIM:/PATH
    in_image: tuple[Path, ...] = ()
    secret: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()  # NAME=AMOUNT
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: tuple[str, ...] = ()  # LABEL=VALUE
    service_account: str | None = None


@dataclass(frozen=True)
class File:
    """A file of the job, which is mounted in the container at the same path as here."""

    name: str  # in the ConfigMap
    path: str
    content: str


def launch_kubernetes(arguments: JobFileArguments, kubernetes: KubernetesArguments) -> int:
    """Print or write the objects, and return the exit code. Raises UserError, and ConfigError for the job."""
    check_options((arguments, kubernetes), advice=_SECRETS)
    claims = [text.partition(":")[::2] for text in kubernetes.claim]
    for claim, path in claims:
        if not claim or not path.startswith("/"):
            raise UserError(f"--claim {claim}:{path}: write CLAIM:/PATH, a persistent volume claim and its mount path.")
    volumes = tuple(Path(path) for _, path in claims)
    folders = (*volumes, *kubernetes.in_image)
    request, loaded = check_job(replace(arguments, elsewhere=folders))
    _require_mounted(request, loaded, volumes=volumes, folders=folders)
    files = _job_files(arguments, loaded)
    for file in files:
        check_text(file.content, source=file.path, advice=_SECRETS, redact=redacted_yaml)
    typed = [text for text in kubernetes.secret if "=" in text]
    secret_keys = {}
    for variable, secret in read_pairs(typed, option="--secret", noun="variable", name=_VARIABLE).items():
        name, _, key = secret.partition(":")
        if not name or not key:
            raise UserError(f"--secret {variable}: write VARIABLE=NAME:KEY, a secret and one of its keys.")
        secret_keys[variable] = name, key
    resources = read_pairs(kubernetes.resource, option="--resource", noun="resource", name=_RESOURCE)
    if request.uses_gpus:
        resources[kubernetes.gpu_resource] = str(request.job.ranks_per_host)
    deepspeed = next((file.path for file in files if file.name == "deepspeed.json"), None)
    address = f"{request.name}-node-0-0.{request.name}"
    first_pod = {"MACHINE_RANK": '"$JOB_COMPLETION_INDEX"', "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    text = render(
        "kubernetes.yaml.jinja",
        name=request.name,
        options=kubernetes,
        files=files,
        num_nodes=request.num_nodes,
        final_codes=_FINAL_CODES,
        grace_seconds=request.stop_seconds + _DECIDING_SECONDS,
        node_selector=read_pairs(kubernetes.node_selector, option="--node-selector", noun="label", name=_RESOURCE),
        claims=claims,
        script=host_script(replace(request, deepspeed_file=deepspeed), first_pod),
        variables=request.variables(),
        secrets=[name for name in kubernetes.secret if "=" not in name],
        secret_keys=secret_keys,
        resources=resources,
    )
    return deliver(text, arguments.output, advice=_SECRETS)


def _require_mounted(
    request: JobRequest, loaded: LoadedConfig, *, volumes: Sequence[Path], folders: Sequence[Path]
) -> None:
    """Raise UserError where the run is written to a folder that is lost with its pod, or reads one that no pod has.

    On one host a run at a URL may be written anywhere first: it is uploaded from there.
    """
    key, folder = (
        ("run.local_folder", request.local_folder) if request.is_at_url else ("run.folder", request.run_folder)
    )
    is_kept = folder is not None and any(Path(folder).is_relative_to(path) for path in volumes)
    if not is_kept and not (request.is_at_url and request.num_nodes == 1):
        raise UserError(
            f"{key}: {folder or 'it is not set, and the default'} exists only in the pod, and is lost with it. Mount a "
            "volume that all pods can write: --claim CLAIM:/PATH"
        )
    for key, path in read_paths(loaded.config):
        if not any(Path(path).is_relative_to(folder) for folder in folders):
            raise UserError(
                f"{key}: {path} is only on this machine, not on the hosts. Mount a volume with --claim CLAIM:/PATH, or "
                "name a folder of the image with --in-image."
            )


def _job_files(arguments: JobFileArguments, loaded: LoadedConfig) -> tuple[File, ...]:
    """Return the job, the accelerate file and its DeepSpeed config. Raises UserError."""
    values = read_accelerate_file(arguments.accelerate).values
    named = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    try:
        files = [
            File("job.yaml", str(arguments.config.absolute()), loaded.text),
            File("accelerate.yaml", str(arguments.accelerate.absolute()), read_text_file(arguments.accelerate)),
        ]
        if named is not None:
            files.append(File("deepspeed.json", str(Path(named).absolute()), read_text_file(Path(named))))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--accelerate {arguments.accelerate}: {named or 'the file'} cannot be read: {error}."
        ) from error
    return tuple(files)
