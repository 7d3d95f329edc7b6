"""No job file holds a secret or a character that nobody sees, whichever option or file brings it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.commands.launch.job_files import JobFileArguments, make_job
from finetune.commands.launch.kubernetes import KubernetesArguments, launch_kubernetes
from finetune.commands.launch.slurm import SlurmArguments, launch_slurm
from finetune.commands.launch.torchrun import print_commands
from finetune.errors import UserError
from tests.refusals import refused

SECRET = "canary77"
HIDDEN = ("\u202e", "\u2066", "\x1b", "\x07", "\r", "\u200b", "\u2028", "\x9b")
ADVICE = {"slurm": "--env-file", "kubernetes": "secretKeyRef"}

Launch = Callable[..., str]


@pytest.fixture
def launch(words: Callable[..., JobFileArguments], project: Path) -> Launch:
    """Return a function that writes the job file of a scheduler with further options, and returns its text."""

    def write(scheduler: str, *, shared: dict[str, Any] | None = None, **options: Any) -> str:
        made = replace(words("ddp"), **(shared or {}), output=Path("out"))
        if scheduler == "slurm":
            launch_slurm(made, SlurmArguments(**options))
        else:
            at_data = replace(made, override=(*made.override, "run.folder=/data/run"))
            there = {"image": "registry/x:1", "claim": ("data:/data",), "in_image": (project,), **options}
            launch_kubernetes(at_data, KubernetesArguments(**there))
        return Path("out").read_text()

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
        "line": {"setup": (f"export HF_TOKEN={SECRET}",)},
    },
    "kubernetes": {
        "image": {"image": f"me:{SECRET}@registry/x:1"},
        "image as a URL": {"image": f"https://me:{SECRET}@registry/x:1"},
        "label": {"node_selector": (f"api_key={SECRET}",)},
    },
}
CASES = [(name, {"shared": options}) for name in ADVICE for options in SHARED.values()]
CASES += [(name, options) for name in ADVICE for options in OWN[name].values()]


@pytest.mark.parametrize(("scheduler", "options"), CASES)
def test_a_literal_secret_is_refused_with_the_way_of_the_scheduler(launch, scheduler, options):
    with refused(UserError) as caught:
        launch(scheduler, **options)
    message = str(caught.value)
    assert SECRET not in message and "12345" not in message and ADVICE[scheduler] in message
    assert not Path("out").exists()


@pytest.mark.parametrize("file", ["job.yaml", "accelerate_configs/ddp.yaml"])
def test_a_secret_in_a_file_of_a_config_map_is_refused_with_its_line(launch, project, file):
    path = project / file
    path.write_text(f"{path.read_text()}# password: {SECRET}\n")
    with pytest.raises(
        UserError, match=rf"{file}, line {len(path.read_text().splitlines())}: this is a secret"
    ) as caught:
        launch("kubernetes")
    assert SECRET not in str(caught.value)
    assert launch("slurm")  # it names the file, and does not hold it


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
    assert env.partition("=")[0] in launch(scheduler, shared={"env": (env,)})


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("scheduler", ADVICE)
def test_invisible_characters_are_refused_in_options_and_folders(launch, project, monkeypatch, scheduler, hidden):
    own = {"slurm": "partition", "kubernetes": "image"}[scheduler]
    job = project / f"job{hidden}.yaml"
    job.write_text((project / "job.yaml").read_text())
    for options in ({"shared": {"env": (f"A=b{hidden}c",)}}, {own: f"a{hidden}b"}, {"shared": {"config": job}}):
        with refused(UserError):
            launch(scheduler, **options)
    folder = project / f"in{hidden}side"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if scheduler == "slurm":
        with refused(UserError):
            launch(scheduler)


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
    text = launch("kubernetes", secret=("all-keys", "API_KEY=wandb:key"))
    reference = {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}
    assert reference in _environments(list(YAML(typ="safe").load_all(text)))
    assert "envFrom" in text and "all-keys" in text


def _environments(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.get("env", ()), *(each for item in value.values() for each in _environments(item))]
    return [each for item in value for each in _environments(item)] if isinstance(value, list) else []
