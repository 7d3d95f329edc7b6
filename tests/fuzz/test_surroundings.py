"""Every command in every kind of surroundings ends in time, with a known exit code and without a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from finetune.cli.app import app
from finetune.runtime.text.standard_streams import CLOSED_PIPE
from tests.fuzz import surroundings
from tests.fuzz.cases import Ground

JOB = ("--config", "job.yaml")
HOSTS = ("--accelerate", "ddp.yaml", "--nodes", "2", "--gpus-per-node", "1")
TYPED = {
    "train": [(*JOB, "--set", "run.folder=runs/again"), ("--config", "missing.yaml")],
    "check": [("job.yaml",), ("missing.yaml",)],
    "prepare": [JOB],
    "preview": [JOB, ("train.jsonl",)],
    "reference": [(), JOB],
    "agents": [()],
    "plugins list": [(), JOB],
    "plugins test": [("no_such_plugin", *JOB)],
    "schema": [()],
    "init": [(), ("quickstart", "--into", "out"), ("quickstart", "--into", "/proc/x")],
    "export": [("runs/job", "--to", "out"), ("runs/job", "--to", "/proc/x")],
    "evaluate": [("runs/job",), ("runs/job", "--json", "/proc/x.json")],
    "generate": [
        ("runs/job/final", "--input", "prompts.jsonl", "--output", "out/answers.jsonl"),
        ("runs/job/final", "--input", "prompts.jsonl", "--output", "/proc/answers.jsonl"),
    ],
    "chat": [("runs/job",)],
    "doctor": [()],
    "plan": [(*JOB, "--gpus", "1xH100-80GB")],
    "rehearse": [(*JOB, "--accelerate", "missing.yaml")],
    "report": [("runs/job",)],
    "compare": [("runs/job", "runs/job")],
    "sweep": [(*JOB, "--set", "run.seed=1,2", "--dry-run")],
    "verify parity": [("--config", "missing.yaml")],
    "verify resume": [("--config", "missing.yaml", "--stop-at", "1")],
    "verify replay": [("runs/job",), ("runs/job", "--layers"), ("missing",)],
    "verify serving": [("adapter", "--engine", "openai:http://127.0.0.1:9/v1"), ("adapter", "--engine", "llama.cpp")],
    "checkpoint ls": [("runs/job",)],
    "checkpoint show": [("runs/job",)],
    "checkpoint verify": [("runs/job",)],
    "checkpoint prune": [("runs/job",)],
    "checkpoint export": [("runs/job", "--to", "out")],
    "launch torchrun": [(*JOB, *HOSTS)],
    "launch ray": [(*JOB, *HOSTS, "--address", "127.0.0.1:1")],
    "launch slurm": [(*JOB, *HOSTS), (*JOB, *HOSTS, "--output", "/proc/x")],
    "launch kubernetes": [(*JOB, *HOSTS, "--image", "image")],
    "launch next": [("--run", "runs/job", "--since", "0", "--exit-code", "1")],
}
"""What is typed to each command: something that works, and something that is refused."""

CODES = (0, 1, 2, 75, CLOSED_PIPE)  # 75: `launch next` would start the job again


def commands(command: Any, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the words of every command of the program."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*prefix, name))
    else:
        yield " ".join(prefix)


def violation(ground: Ground, words: tuple[str, ...], around: str) -> str | None:
    outcome = ground.outcome(words, surroundings=around)
    printed = outcome.stdout + outcome.stderr
    if outcome.code is None:
        return "did not end"
    if "Traceback" in printed or "Exception ignored" in printed:
        return printed[-1500:]
    if outcome.code not in CODES:
        return f"exit code {outcome.code}: {printed[-500:]}"
    if outcome.code == 2 and not printed.strip() and around in (surroundings.NO_FOLDER, surroundings.FEW_FILES):
        return "exit code 2 without a message"
    return None


def test_every_command_is_typed_here():
    assert sorted(TYPED) == sorted(commands(typer.main.get_command(app)))


@pytest.mark.slow
@pytest.mark.parametrize("around", surroundings.SURROUNDINGS)
def test_no_command_ends_with_a_traceback_in(around: str, ground: Ground):
    if around == surroundings.READ_ONLY and os.getuid() != 0:
        pytest.skip("only root can remove such a folder again")
    typed = [(*name.split(), *words) for name, each in TYPED.items() for words in each] + [("--help",), ("--version",)]
    found = {" ".join(words): wrong for words in typed if (wrong := violation(ground, words, around))}
    assert not found, "\n\n".join(f"{words}\n{wrong}" for words, wrong in found.items())


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 0, ""), ("2>&-", 0, ""), ("> /dev/full", 2, "the disk is full"), ("| true", CLOSED_PIPE, "")],
)
def test_a_closed_full_or_unread_output_gives_no_traceback(redirection: str, code: int, message: str):
    """`reference` writes more than a pipe holds; its reader is gone by then."""
    script = f"set -o pipefail; {sys.executable} -m finetune reference {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode in (code, 0 if redirection.startswith("|") else code), done.stderr  # a fast reader has ended
    assert message in done.stderr and "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("milliseconds", [30, 100, 300])
def test_ctrl_c_at_any_moment_of_the_start_is_one_line(milliseconds: int, tmp_path: Path):
    begin = "import sys; from finetune.cli.program import main, standard_streams; sys.argv[1:] = ['schema']; "
    ready = "standard_streams.exit_on_interrupt(); print('ready', flush=True); main()"
    program = subprocess.Popen(
        [sys.executable, "-c", begin + ready], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    time.sleep(milliseconds / 1000)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode in (0, 130, -signal.SIGINT), errors
    assert errors in ("", "interrupted\n")


PROGRAM = """
import os, signal, sys, time
from types import SimpleNamespace
import typer
from finetune.cli import program
from finetune.cli.exit_codes import CommandGroup
from finetune.runtime.optional import lazily
sys.path.insert(0, ".")
with lazily(freeze=True):
    import slow
def parse(value): {parse}; return value
app = typer.Typer(cls=CommandGroup)
@app.callback()
def root(): pass
@app.command()
def run(value: str = typer.Option("a", callback=parse)): {run}
program.command_line = SimpleNamespace(app=app)
sys.argv[1:] = ["run", "--value", "b"]
program.NOT_TRAIN += ("run",)
signal.signal(signal.SIGINT, signal.default_int_handler)
program.main()
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"


@pytest.mark.parametrize(
    ("parse", "run"),
    [(INTERRUPT, "pass"), ("pass", "slow.anything"), ("pass", INTERRUPT)],
    ids=["it parses its options", "it imports", "it runs"],
)
def test_ctrl_c_in_a_command_is_one_line_and_code_130_while(parse: str, run: str, tmp_path: Path):
    swallow = f"try: {INTERRUPT}\nexcept BaseException: raise ImportError('as transformers does')"
    (tmp_path / "slow.py").write_text(f"import os, signal, time\n{swallow}")
    program = PROGRAM.format(parse=parse, run=run)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_closed_descriptor_is_not_taken_by_the_next_file():
    code = (
        "from finetune.runtime.text.standard_streams import open_missing_streams; import os; open_missing_streams(); "
        "assert os.open('/dev/null', os.O_RDONLY) > 2; print('x')"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" <&- >&-'], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
