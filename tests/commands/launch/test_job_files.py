"""No job file holds a secret or a character that nobody sees, whichever option or file brings it."""

import json
import stat
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.commands.doctor.facts import Facts, HostFacts
from finetune.commands.doctor.gpus import GpuFacts
from finetune.commands.doctor.network import InfinibandPort, NetworkFacts
from finetune.commands.launch.job_files import Destination, JobFileArguments, check_job, make_job, network_variables
from finetune.commands.launch.kubernetes import KubernetesArguments, launch_kubernetes
from finetune.commands.launch.skypilot import SkypilotArguments, launch_skypilot
from finetune.commands.launch.slurm import SlurmArguments, launch_slurm
from finetune.commands.launch.torchrun import print_commands
from finetune.errors import UserError
from tests.commands.doctor.recorded import FOLDER, host_of
from tests.refusals import refused

SECRET = "canary77"
HIDDEN = ("\u202e", "\u2066", "\x1b", "\x07", "\r", "\u200b", "\u2028", "\x9b")
ADVICE = {"slurm": "--env-file", "kubernetes": "secretKeyRef", "skypilot": "--secret NAME"}

Launch = Callable[..., str]


@pytest.fixture
def launch(words: Callable[..., JobFileArguments], project: Path) -> Launch:
    """Return a function that writes the job file of a scheduler with further options, and returns its text."""

    def write(scheduler: str, *, destination: Destination | None = None, **options: Any) -> str:
        target = destination or Destination(output=Path("out"))
        shared = {
            name: value for name, value in options.items() if name in {field.name for field in fields(JobFileArguments)}
        }
        own = {name: value for name, value in options.items() if name not in shared}
        made = words("ddp", **{name: value for name, value in shared.items() if name in ("env", "override")})
        made = replace(made, **shared)
        if scheduler == "slurm":
            launch_slurm(made, SlurmArguments(**own), target)
        elif scheduler == "kubernetes":
            at_data = replace(made, override=(*made.override, "run.folder=/data/run"))
            there = {"image": "registry/x:1", "claim": ("data:/data",), "in_image": (project,), **own}
            launch_kubernetes(at_data, KubernetesArguments(**there), target)
        else:
            at_data = replace(made, override=(*made.override, "run.folder=/data/run"))
            launch_skypilot(at_data, SkypilotArguments(**{"gpu": "H100", "volume": ("/data=v",), **own}), target)
        return Path("out").read_text() if target.output else ""

    return write


SHARED: dict[str, dict[str, Any]] = {
    "env": {"env": (f"WANDB_API_KEY={SECRET}",)},
    "env, short": {"env": ("DB_PASSWORD=12345",)},
    "URL in env": {"env": (f"PROXY=http://me:{SECRET}@proxy:80",)},
    "command in env": {"env": (f"EXTRA=--hub-token {SECRET} --x",)},
    "token by its shape": {"env": ("X=hf_abcdefghijklmnopqrstuvwx",)},
    "override": {"override": (f'run.on_end="push --password={SECRET}; x"',)},
    "mapping in an override": {"override": (f"model.from_config.values={{a: {{api_key: {SECRET}}}}}",)},
    "URL in an override": {"override": (f"data.train.path=https://me:{SECRET}@h/rows.jsonl",)},
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "slurm": {
        "image": {"container": f"docker://me:{SECRET}@registry/x"},
        "image of pyxis": {"container": f"me:{SECRET}@nvcr.io#nvidia/pytorch", "container_runtime": "pyxis"},
        "directive": {"sbatch": (f"--export=ALL,HF_TOKEN={SECRET}",)},
        "comment": {"sbatch": (f"--comment=password={SECRET}",)},
        "partition": {"partition": f"token={SECRET}"},
        "sweep": {"sweep": (f'report.project="--password={SECRET}",b',)},
    },
    "kubernetes": {
        "image": {"image": f"me:{SECRET}@registry/x:1"},
        "image as a URL": {"image": f"https://me:{SECRET}@registry/x:1"},
        "label": {"node_selector": (f"api_key={SECRET}",)},
    },
    "skypilot": {
        "setup": {"setup": f"pip install git+https://me:{SECRET}@github.com/x/y"},
        "export in setup": {"setup": f"export HF_TOKEN={SECRET}\npip install x"},
        "image": {"image": f"docker:me:{SECRET}@registry/x"},
        "infra": {"infra": f"aws?token={SECRET}"},
    },
}
CASES = [(name, what, options) for name in ADVICE for what, options in {**SHARED, **OWN[name]}.items()]


@pytest.mark.parametrize(("scheduler", "options"), [(name, options) for name, _, options in CASES])
def test_a_literal_secret_is_refused_with_the_way_of_the_scheduler(launch, scheduler, options, capsys):
    with refused(UserError) as caught:
        launch(scheduler, **options)
    message = str(caught.value)
    assert SECRET not in message and "12345" not in message and ADVICE[scheduler] in message
    assert "--allow-secrets" in message and not Path("out").exists()


@pytest.mark.parametrize("file", ["job.yaml", "accelerate_configs/ddp.yaml"])
def test_a_secret_in_a_file_of_a_config_map_is_refused_with_its_line(launch, project, file):
    path = project / file
    path.write_text(f"{path.read_text()}# password: {SECRET}\n")
    with pytest.raises(
        UserError, match=rf"{file}, line {len(path.read_text().splitlines())}: this is a secret"
    ) as caught:
        launch("kubernetes")
    assert SECRET not in str(caught.value)
    assert launch("slurm") and launch("skypilot")  # they name the file, and do not hold it


@pytest.mark.parametrize("scheduler", ADVICE)
def test_allow_secrets_writes_a_private_file_and_prints_no_secret(launch, scheduler, capsys):
    text = launch(scheduler, env=(f"API_KEY={SECRET}",), destination=Destination(Path("out"), allow_secrets=True))
    assert SECRET in text and stat.S_IMODE(Path("out").stat().st_mode) == 0o600
    with refused(UserError, "--output FILE"):
        launch(scheduler, env=(f"API_KEY={SECRET}",), destination=Destination(allow_secrets=True))
    assert SECRET not in capsys.readouterr().out
    launch(scheduler)
    assert stat.S_IMODE(Path("out").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "env",
    [
        "TOKENIZERS_PARALLELISM=false",
        "MAX_TOKENS=1000",
        "HF_TOKEN_PATH=/x/token",
        "WANDB_MODE=offline",
        "API_KEY=",
        "A=$B",
    ],
)
@pytest.mark.parametrize("scheduler", ADVICE)
def test_other_variables_are_written(launch, scheduler, env):
    assert env.partition("=")[0] in launch(scheduler, env=(env,))


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("scheduler", ADVICE)
def test_invisible_characters_are_refused_in_options_and_folders(launch, project, monkeypatch, scheduler, hidden):
    own = {"slurm": "partition", "kubernetes": "image", "skypilot": "setup"}[scheduler]
    job = project / f"job{hidden}.yaml"
    job.write_text((project / "job.yaml").read_text())
    for options in ({"env": (f"A=b{hidden}c",)}, {own: f"a{hidden}b"}, {"config": job}):
        with refused(UserError):
            launch(scheduler, **options)
    folder = project / f"in{hidden}side"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if scheduler == "slurm":
        with refused(UserError):
            launch(scheduler)


def test_the_printed_job_file_is_byte_identical_to_the_written_one(launch, words, capsysbinary):
    text = launch("slurm", env=("A=ümläut 日本語 🙂 e\u0301",))
    launch("slurm", env=("A=ümläut 日本語 🙂 e\u0301",), destination=Destination())
    assert capsysbinary.readouterr().out == text.encode()


def test_commands_of_hosts_hold_no_secret_and_no_invisible_character(words, capsys):
    for override, is_refused in (
        (f'run.on_end="push --password {SECRET}"', True),
        ('run.on_end="echo \\u202e"', False),
        ('run.on_end="echo \u202e"', True),
    ):
        made = words("ddp", override=(override,))
        job, loaded = make_job(made.config, made.override, accelerate_file=made.accelerate, ranks_per_host=2)
        if not is_refused:
            print_commands(job, loaded, num_hosts=2)
            continue
        with refused(UserError) as caught:
            print_commands(job, loaded, num_hosts=2)
        assert SECRET not in str(caught.value)


def test_secrets_have_a_way_of_their_own(launch):
    file = Path("variables")
    file.write_text(f"API_KEY={SECRET}\n")
    with refused(UserError, "600 variables"):
        launch("slurm", env_file=file)
    file.chmod(0o600)
    assert f"set -a\n# shellcheck disable=SC1090,SC1091\n. {file.absolute()} || exit 2\nset +a\n" in launch(
        "slurm", env_file=file
    )
    for kind in ("jobset", "trainjob"):
        text = launch("kubernetes", secret=("all-keys", "API_KEY=wandb:key"), kind=kind)
        reference = {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}
        assert reference in _environments(list(YAML(typ="safe").load_all(text)))
        assert "envFrom" in text and "all-keys" in text
    task = YAML(typ="safe").load(launch("skypilot", secret=("API_KEY",)))
    assert task["secrets"] == {"API_KEY": None}
    for scheduler, secret in (("kubernetes", "API_KEY=wandb"), ("skypilot", f"API_KEY={SECRET}")):
        with refused(UserError, "--secret") as caught:
            launch(scheduler, secret=(secret,))
        assert SECRET not in str(caught.value)


def _environments(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.get("env", ()), *(each for item in value.values() for each in _environments(item))]
    return [each for item in value for each in _environments(item)] if isinstance(value, list) else []


SOCKETS = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}


def made(*ports: tuple[str, str, str], interface: str | None = "eth0") -> HostFacts:
    found = tuple(InfinibandPort(device, 1, state, link_layer=layer) for device, state, layer in ports)
    return HostFacts("host", network=NetworkFacts(default_interface=interface, infiniband=found))


IB, IB_DOWN = ("mlx5_0", "ACTIVE", "InfiniBand"), ("mlx5_1", "DOWN", "InfiniBand")
ROCE, EFA = ("mlx5_2", "ACTIVE", "Ethernet"), ("rdmap79s0", "ACTIVE", "Unspecified")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([made()], SOCKETS),
        ([made(interface=None)], {}),
        ([made(), made(interface="ens5")], {}),
        ([made(IB)], SOCKETS),
        ([made(ROCE)], SOCKETS),
        ([made(IB, IB_DOWN), made(IB, IB_DOWN)], SOCKETS | {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([made(IB, ROCE)], SOCKETS | {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([made(IB_DOWN)], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(IB), made(IB_DOWN)], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(IB), made()], SOCKETS | {"NCCL_IB_DISABLE": "1"}),
        ([made(EFA)], SOCKETS | {"FI_PROVIDER": "efa"}),
    ],
)
def test_two_hosts(hosts, expected):
    assert network_variables(Facts(tuple(hosts)), num_nodes=2) == expected


def test_one_host_needs_no_network():
    assert network_variables(Facts((made(IB, IB_DOWN),)), num_nodes=1) == {}


def test_gpus_that_must_not_copy_directly_do_not():
    pair = host_of("rtx4090_pair")
    assert network_variables(Facts((pair,)), num_nodes=1) == {"NCCL_P2P_DISABLE": "1"}
    assert "NCCL_P2P_DISABLE" not in network_variables(Facts((host_of("h100_nvswitch"),)), num_nodes=1)


def test_every_recorded_machine_gives_settings_of_known_names():
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    known = {*SOCKETS, "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "FI_PROVIDER"}
    for name in names:
        assert network_variables(Facts((host_of(name),)), num_nodes=2).keys() <= known
    assert len(names) >= 5


def test_options_override_the_facts_file_of_doctor(words, project):
    facts = Facts((made(IB, IB_DOWN),))
    (project / "facts.json").write_text(json.dumps({"facts": asdict(facts), "findings": []}))
    request, _ = check_job(words("ddp", doctor=project / "facts.json", env=("NCCL_IB_HCA==mlx5_9",)))
    assert request.variables()["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert request.variables()["NCCL_IB_HCA"] == "=mlx5_9"
    assert GpuFacts() == facts.hosts[0].gpus
