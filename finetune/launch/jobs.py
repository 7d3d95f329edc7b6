"""The commands of a job's hosts, as shell text and YAML for schedulers.

Nothing here has side effects: each function returns text. User input reaches a shell only through `quoted`, and YAML
only through `yaml_text`, whose texts mean the same in versions 1.1 and 1.2: `yes` and `010` stay strings.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

PORT = 29500
"""Default port of the rendezvous."""

TEE = "3"
"""torchelastic's number for standard output and error, each to a file and to the console."""


@dataclass(frozen=True)
class ShellText:
    """A word that the shell expands, such as `"$RANK"`, with its quotes."""

    text: str


Word = str | ShellText


@dataclass(frozen=True)
class LaunchJob:
    """The job to launch on every host."""

    arguments: tuple[str, ...]  # arguments after `accelerate launch ...`: -m finetune --config JOB.yaml ...
    accelerate_file: Path
    ranks_per_host: int
    is_hybrid: bool = False  # HSDP: a copy of the model per host
    sequence_size: int = 1  # ranks that share the tokens of every row
    is_deepspeed: bool = False  # which Accelerate would launch through pdsh on all hosts at once


def launch_command(job: LaunchJob, *, num_hosts: int, rank: int, address: str) -> list[str]:
    """Return the command of the host with this number: three words of Python, then `accelerate launch` and its words.

    `address` is that of the first host.
    """
    hybrid = (
        ("--parallelism_config_dp_replicate_size", str(num_hosts)),
        ("--parallelism_config_dp_shard_size", str(job.ranks_per_host // job.sequence_size)),
    )
    options = (
        ("--config_file", str(job.accelerate_file)),
        ("--num_machines", str(num_hosts)),
        ("--num_processes", str(num_hosts * job.ranks_per_host)),
        ("--machine_rank", str(rank)),
        ("--main_process_ip", address),
        ("--main_process_port", str(PORT)),
        *(hybrid if job.is_hybrid else ()),
        *((("--deepspeed_multinode_launcher", "standard"),) if job.is_deepspeed else ()),
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*launcher, *(word for option in options for word in option), *job.arguments]


@dataclass(frozen=True)
class JobRequest:
    """One job on several hosts."""

    name: str  # valid for every scheduler: lowercase letters, digits and dashes
    job: LaunchJob
    num_nodes: int
    run_folder: str  # a folder that all hosts share, or a URL
    local_folder: str | None  # of a run at a URL, if the job names one
    is_single: bool  # one process, which needs no launcher
    deepspeed_file: str | None = None  # replaces the path in the accelerate file
    max_restarts: int = 3
    stop_seconds: int = 180  # from the stop request until all processes are killed
    uses_gpus: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_at_url(self) -> bool:
        """Return whether the run is kept in object storage."""
        return "://" in self.run_folder

    def variables(self) -> dict[str, str]:
        """Return the environment of the ranks; variables of the user take precedence."""
        timeout = str(max(1, self.stop_seconds - 10))  # the launcher kills ranks after it, the scheduler kills both
        return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": timeout, "PYTHONUNBUFFERED": "1", **self.environment}


def launch_words(request: JobRequest, *, machine_rank: str, log_folder: Word | None) -> list[Word]:
    """Return the command of a host: `accelerate launch`, or the one process itself.

    The output of each rank also goes to a file in the log folder. The shell has the number of the host in the variable
    `machine_rank`, and MASTER_ADDR and MASTER_PORT.
    """
    if request.is_single:
        module, *rest = request.job.arguments[1:]
        return ["python", "-m", module, "train", "--accelerate", str(request.job.accelerate_file), *rest]
    words = launch_command(request.job, num_hosts=request.num_nodes, rank=0, address="")[1:]
    options: list[Word] = list(words[: len(words) - len(request.job.arguments)])
    expanded = {
        "--machine_rank": machine_rank,
        "--main_process_ip": "MASTER_ADDR",
        "--main_process_port": "MASTER_PORT",
    }
    for option, variable in expanded.items():
        options[words.index(option) + 1] = ShellText(f'"${variable}"')
    if request.num_nodes > 1:
        options += ["--same_network", "--rdzv_backend", "static"]
    if request.deepspeed_file is not None:
        options += ["--deepspeed_config_file", request.deepspeed_file]
    if log_folder is not None:
        options += ["--tee", TEE, "--log_dir", log_folder]
    return ["python", *options, *request.job.arguments]


def next_words(request: JobRequest, *, run_folder: Word, code: str, machine_rank: Word | None = None) -> list[Word]:
    """Return the command that decides, after the launcher has ended, whether the job is restarted."""
    words: list[Word] = ["python", "-m", "finetune", "launch", "next", "--run", run_folder]
    words += ["--since", ShellText('"$started"'), "--exit-code", ShellText(f'"${code}"')]
    words += ["--max-restarts", str(request.max_restarts)]
    if request.local_folder is not None:
        words += ["--local-folder", request.local_folder]
    return words if machine_rank is None else [*words, "--machine-rank", machine_rank]


LOCAL_LOGS = "/tmp/finetune-logs"
"""Folder of the ranks' logs for a run at a URL; the log of the host also has their output."""


def host_script(request: JobRequest, variables: Mapping[str, str]) -> str:
    """Return the script for a POSIX shell; its exit code is for the scheduler.

    `variables` has the shell expressions of MACHINE_RANK, MASTER_ADDR and MASTER_PORT on this scheduler.
    """
    needed = ["MACHINE_RANK"] if request.is_single else list(variables)
    logs: Word = LOCAL_LOGS
    if not request.is_at_url:
        logs = ShellText(f'{quoted(request.run_folder)}"/logs/host-$MACHINE_RANK"')
    rank = ShellText('"$MACHINE_RANK"')
    return render(
        "host.sh.jinja",
        variables={name: variables[name] for name in needed},
        launch=command_line(launch_words(request, machine_rank="MACHINE_RANK", log_folder=logs)),
        next=command_line(next_words(request, run_folder=request.run_folder, code="code", machine_rank=rank)),
    )


def quoted(word: Word) -> str:
    """Return the word, quoted for the shell.

    >>> quoted("a b"), quoted(ShellText('"$RANK"'))
    ("'a b'", '"$RANK"')
    """
    if isinstance(word, ShellText):
        return word.text
    text = shlex.quote(word)
    return f"'{text}'" if text.startswith("=") else text  # `NAME==` looks like a comparison


def command_line(command: Iterable[Word]) -> str:
    """Return the command as one line of a shell script, or several where a word has several."""
    return " ".join(map(quoted, command))


def render(template: str, **values: Any) -> str:
    """Return the job file of a template; `quoted`, `command_line`, `yaml` and `unexpanded` are filters in it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell text and YAML; the filters quote user input
    )
    environment.filters |= {
        "quoted": quoted,
        "command_line": command_line,
        "yaml": yaml_text,
        "unexpanded": unexpanded,
    }
    return environment.get_template(template).render(**values)


def yaml_text(text: str, *, indent: int = 0) -> str:
    """Return the text as a quoted string of YAML; several whole lines as a block, indented by `indent`."""
    lines = text.split("\n")
    is_block = len(lines) > 2 and not lines[-1] and lines[-2] and not lines[0].startswith(" ")
    if is_block and lines[0] and all(line.isprintable() and line == line.rstrip() for line in lines):
        return "\n".join(["|", *(f"{' ' * indent}{line}" if line else "" for line in lines[:-1])])
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    letters = (letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped)
    return f'"{"".join(letters)}"'


def unexpanded(text: str) -> str:
    """Return the text so that Kubernetes, which expands `$(NAME)` and turns `$$` into `$`, leaves it as it was."""
    return re.sub(r"\$(?=[$(])", "$$", text)
