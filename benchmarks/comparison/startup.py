"""Topic 4: from the start of a process to the end of its first step, and to the answer of `--help` and a wrong key.

All competitors start a process of their own, in an order drawn anew each round: ours (`python -m finetune`, data
prepared by an earlier start), a bare script and `transformers.Trainer`, which tokenize the same documents. Every
document is cut at the same length, so all take the same first step. Ours is read from the event `StartedUp`.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.report.history import read_events

from comparison.results import Log, PartResults, Result, Spread
from comparison.workloads import Form

FEW, MANY = 400, 40_000
LENGTH, VOCABULARY = 64, 8192
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
ANSWER_SECONDS, ANSWER_RATIO = 0.4, 2.5
"""CPU-seconds of an answer, or how many times those of the imports that no answer can do without."""

IMPORTS = "import pydantic, typer, ruamel.yaml"

WORKER = Path(__file__).with_name("startup_worker.py")
REPOSITORY = Path(__file__).parents[2]

Start = Mapping[str, float]
"""What a start took: `cpu` and wall `seconds`."""


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return what starts cost."""
    folder, many = folder.resolve(), form.choose(MANY, MANY, FEW)
    _run([sys.executable, str(WORKER), "make", str(folder), str(FEW), str(many), str(VOCABULARY)], folder)
    for number in {FEW, many}:
        (folder / f"job{number}.yaml").write_text(json.dumps(_job(number), indent=1))
    starts: dict[str, Callable[[], Start]] = {
        "ours": lambda: _ours(folder, FEW),
        "ours, more documents": lambda: _ours(folder, many),
        "bare": lambda: _theirs(folder, "bare", FEW),
        "Trainer": lambda: _theirs(folder, "trainer", FEW),
    }
    for number in {FEW, many}:
        _ours(folder, number)  # prepares the data
    taken = _in_rounds(starts, num_rounds=form.choose(9, 3, 1), log=log)
    answers = _answers(folder, num_rounds=form.choose(15, 9, 1))
    found = results(taken, answers)
    return PartResults(found, [], {"starts": taken, "answers": answers})


def results(taken: Mapping[str, list[Start]], answers: Mapping[str, list[float]]) -> list[Result]:
    """Return the starts and answers beside their thresholds."""
    cpu = {name: [each["cpu"] for each in starts] for name, starts in taken.items()}
    ours, more, bare, trainer = (cpu[name] for name in cpu)
    setting = f"8.4M parameters, {FEW} documents of {LENGTH} tokens, CPU-seconds, one thread"
    found = [
        Result(4, "start to first step, ours / bare", Spread.of_ratios(ours, bare), 1.05, "lower", note=setting),
        Result(4, "start to first step, ours / Trainer", Spread.of_ratios(ours, trainer), 0.8, "lower", note=setting),
        Result(
            *(4, f"start to first step, {MANY:,} documents / {FEW}", Spread.of_ratios(more, ours), 1.15, "lower"),
            note="prepared before",
        ),
    ]
    imports = Spread.of(answers[IMPORTS]).median
    limit, note = max(ANSWER_SECONDS, ANSWER_RATIO * imports), f"{IMPORTS}: {imports:.2f} s in the same minute"
    return found + [
        Result(4, f"{what}: CPU-seconds", Spread.of(seconds), limit, "lower", "s", note=note)
        for what, seconds in answers.items()
        if what != IMPORTS
    ]


def _job(number: int) -> dict[str, Any]:
    return {
        "run": {"folder": f"runs/{number}", "seed": 7},
        "model": {"from_config": {"model_type": "llama", "values": MODEL}, "tokenizer": {"name": "./tokenizer"}},
        "data": {
            "train": {"path": f"documents{number}.jsonl", "format": "text"},
            "max_length": LENGTH,
            "over_length": "truncate",
            "cache_folder": "cache",
        },
        "task": {"name": "pretrain"},
        "train": {"global_batch_size": 8, "microbatch_size": 8, "steps": 2, "learning_rate": 1e-3},
        "export": {"verify": False},
        "report": {"console": "plain"},
    }


def _in_rounds(starts: Mapping[str, Callable[[], Start]], *, num_rounds: int, log: Log) -> dict[str, list[Start]]:
    draw, taken = random.Random(6), {name: [] for name in starts}  # type: ignore[var-annotated]
    for number in range(1, num_rounds + 1):
        for name in draw.sample(list(starts), len(starts)):
            taken[name].append(starts[name]())
        costs = ", ".join(f"{name} {each[-1]['cpu']:.2f}" for name, each in taken.items())
        log(f"start-up, round {number} of {num_rounds}: {costs} CPU-s")
    return taken


def _ours(folder: Path, number: int) -> Start:
    run = folder / "runs" / str(number)
    shutil.rmtree(run, ignore_errors=True)
    _run([sys.executable, "-m", "finetune", "--config", str(folder / f"job{number}.yaml")], folder)
    event = next(each for each in read_events(run / "events.jsonl") if each["event"] == "StartedUp")
    return {"cpu": sum(event["cpu_seconds"].values()), "seconds": sum(event["seconds"].values())}


def _theirs(folder: Path, who: str, number: int) -> Start:
    command = [sys.executable, str(WORKER), who, str(folder), str(number), str(LENGTH), json.dumps(MODEL)]
    start: Start = json.loads(_run(command, folder).splitlines()[-1])
    return start


def _answers(folder: Path, *, num_rounds: int) -> dict[str, list[float]]:
    """Return the CPU-seconds of processes that answer, and of one that only imports, in turns."""
    questions = {what: ["-m", "finetune", *words] for what, words in _questions(folder).items()}
    questions[IMPORTS] = ["-c", IMPORTS]
    rounds = [{what: _answer(words, folder) for what, words in questions.items()} for _ in range(num_rounds)]
    return {what: [each[what] for each in rounds] for what in questions}


def _questions(folder: Path) -> dict[str, list[str]]:
    job = _job(FEW)
    job["data"]["max_lenght"] = job["data"].pop("max_length")
    (folder / "wrong.yaml").write_text(json.dumps(job, indent=1))
    return {"--help": ["--help"], "a wrong key in the job": ["--config", str(folder / "wrong.yaml")]}


def _answer(words: list[str], folder: Path) -> float:
    """Return the CPU-seconds of the process that answers."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _environment() -> dict[str, str]:
    """Return the environment with this repository first, wherever else the package may be installed.

    Its bytecode is kept, as that of any installed package is: the peers' came with their installation.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}
