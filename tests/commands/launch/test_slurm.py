"""Batch scripts of every strategy and variant: shellcheck, the directives, and submitit's for the same request."""

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import submitit.slurm.slurm as submitit

from finetune.commands.launch import job_files
from finetune.commands.launch.job_files import JobFileArguments
from finetune.commands.launch.slurm import SlurmArguments, launch_slurm
from finetune.errors import UserError
from tests.commands.launch.conftest import CONFIGS, fits
from tests.launch.checkers import directives, shellcheck
from tests.launch.hostile import HIDDEN, NAMES
from tests.refusals import refused

SETUPS = {
    "venv": {},
    "modules": {"setup": ("module load cuda/12.4", "conda activate 'a $(name)'")},
    "apptainer": {"container": "images/fine tune.sif"},
    "pyxis": {"container": "nvcr.io#nvidia/pytorch:25.01-py3", "container_runtime": "pyxis"},
}


def script(words: JobFileArguments, **slurm: object) -> str:
    file = Path("job.sbatch")
    assert launch_slurm(replace(words, output=file), SlurmArguments(**slurm)) == 0  # type: ignore[arg-type]
    return file.read_bytes().decode()


def require_right(words, strategies: list[str], setups: Sequence[str] = ("venv",)) -> list[str]:
    """Return the scripts on one and two hosts; fails for other directives than wanted, or a wrong one not refused."""
    scripts = []
    for strategy, nodes, setup in itertools.product(strategies, (1, 2), setups):
        gpus = 1 if strategy == "single" and nodes == 1 else 2
        wanted = words(strategy, nodes=nodes, gpus_per_node=gpus)
        if not fits(strategy, nodes=nodes, gpus_per_node=gpus):
            with refused(UserError, "accelerate_configs"):
                script(wanted, **SETUPS[setup])
            continue
        scripts.append(script(wanted, **SETUPS[setup]))
        found = directives(scripts[-1])
        assert (found["nodes"], found["gpus-per-node"], found["ntasks-per-node"]) == (str(nodes), str(gpus), "1")
        assert found["signal"] == "TERM@180" and found["open-mode"] == "append" and "requeue" in found
    return scripts


def test_every_accelerate_file_gives_a_script_or_is_refused(words):
    scripts = require_right(words, CONFIGS)
    assert 15 <= len(scripts) < 2 * len(CONFIGS)
    assert shellcheck(scripts[0], shell="bash") == ""


@pytest.mark.parametrize(
    ("strategies", "setups"),
    [(["multi_node_fsdp2"], SETUPS), pytest.param(CONFIGS, ["venv"], marks=pytest.mark.full)],
    ids=["each setup", "each strategy"],
)
def test_shellcheck_finds_nothing_in_any_script(words, strategies, setups):
    scripts = require_right(words, strategies, list(setups))
    assert len(set(scripts)) >= 2 * len(SETUPS)
    assert [found for each in scripts if (found := shellcheck(each, shell="bash"))] == []


def test_the_directives_are_those_of_submitit(words):
    shared = {"partition": "gpu", "account": "a"}
    ours = directives(script(words("fsdp2", gpus_per_node=4, stop=120), time="240", cpus_per_node=32, **shared))
    theirs = directives(
        submitit._make_sbatch_string(
            command="x",
            folder="/f",
            job_name="first",
            **{"nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 4, "signal_delay_s": 120},
            **{"time": 240, "cpus_per_task": 32, **shared},
        )
    )
    own_choice = {"output", "error", "wckey", "signal"}  # submitit's own names; its signal is for its own handler
    assert {name: ours[name] for name in theirs if name not in own_choice} == {
        name: value for name, value in theirs.items() if name not in own_choice
    }
    assert theirs["signal"] == "USR2@120" and ours["signal"] == "TERM@120"
    assert ours.keys() - theirs.keys() == {"chdir", "requeue"}


@pytest.mark.parametrize("hostile", NAMES)
def test_hostile_names_are_quoted_or_refused(words, project, hostile):
    """As the name of the job file, as a variable, and as options of sbatch."""
    job = project / f"{hostile}.yaml"
    job.write_text((project / "job.yaml").read_text())
    wanted = replace(words("ddp", env=(f"HOSTILE={hostile}",)), config=job)
    if hostile in HIDDEN:
        with refused(UserError):
            script(wanted)
        return
    text = script(wanted)
    assert shellcheck(text, shell="bash") == ""
    directives(text)
    assert shlex.quote(hostile) in text
    for name in ("partition", "time", "account"):
        if hostile.isprintable() and not set(hostile) & set('\\"'):
            assert directives(script(words("ddp"), **{name: hostile}))[name] == hostile
        else:
            with pytest.raises(UserError, match=f"--{name}="):
                script(words("ddp"), **{name: hostile})


@pytest.mark.parametrize(
    ("others", "slurm", "message"),
    [
        ({"nodes": 3, "gpus_per_node": 3}, {}, "train.global_batch_size"),
        ({"override": ("train.steps=no",)}, {}, "train.steps"),
        ({}, {"mount": (Path("/data"),)}, "--mount"),
        ({}, {"container": "x.sif", "mount": (Path("/a,b"),)}, ""),
        ({}, {"sbatch": ("exclusive",)}, "exclusive"),
        ({}, {"sbatch": ("--comment=a\nb",)}, "--comment"),
        ({"env": ("1X=2",)}, {}, "--env"),
        ({"env": ("X",)}, {}, "--env"),
        ({"env": ("X=1", "X=2")}, {}, ""),
    ],
)
def test_mistakes_are_named(words, others, slurm, message):
    with refused(UserError, message):
        script(words("ddp", **others), **slurm)


def test_a_folder_that_each_host_has_alone_is_refused(words, monkeypatch):
    monkeypatch.setattr(job_files, "_LOCAL_FOLDERS", ("/tmp",))
    with refused(UserError, "run.folder"):
        script(words("ddp", override=("run.folder=/tmp/run",)))
    monkeypatch.setattr(job_files, "_LOCAL_FOLDERS", ("/tmp/stage",))
    with refused(UserError, "run.local_folder"):
        script(words("ddp", override=("run.folder=s3://b/run", "run.local_folder=/tmp/stage")))
    assert script(words("ddp", nodes=1, override=("run.folder=/tmp/run",)))


@pytest.mark.parametrize(
    ("local", "key"),
    [("job.yaml", "--config"), ("rows.jsonl", "data.train.path"), (sys.prefix, "the Python environment")],
)
def test_files_that_every_host_reads_are_refused_where_each_host_has_its_own(words, monkeypatch, local, key):
    arguments = words("ddp", override=("run.folder=/shared/run",))
    folder = arguments.config.parent if local == "job.yaml" else None
    path = arguments.config if folder else Path(local) if local == sys.prefix else arguments.config.parent / local
    monkeypatch.setattr(job_files, "_LOCAL_FOLDERS", (str(path),))
    with pytest.raises(UserError, match=rf"{re.escape(key)}: {re.escape(str(path))} .* local to each host"):
        script(arguments)
    assert script(words("ddp", nodes=1, override=("run.folder=/shared/run",)))


def test_a_slurm_job_is_printed_or_written(words, capsysbinary):
    wanted = words("ddp", env=("A=ümläut 日本語 🙂 e\u0301",))
    assert launch_slurm(wanted, SlurmArguments()) == 0
    assert capsysbinary.readouterr().out == script(wanted).encode()
