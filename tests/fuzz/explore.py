"""Runs many cases and collects what breaks the property: `python -m tests.fuzz.explore --cases 10000 --seed 1`.

Cases are run in batches of fifty, each drawn with a seed of its own. A batch that has ended is recorded in
`batches.jsonl` of the folder `--into`: the same command resumes after the last one. Each kind of violation is written
once, as a file that `test_findings.py` runs when it is moved into `findings/`.
"""

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests import verifier_server
from tests.fuzz.cases import Case, Ground
from tests.fuzz.forked import PLAIN, WITH_TORCH, Server
from tests.fuzz.strategies import Strategy, kinds

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="run one kind of case")
    parser.add_argument("--into", type=Path, default=Path("fuzz-findings"))
    arguments = parser.parse_args()
    record = arguments.into / "batches.jsonl"
    arguments.into.mkdir(parents=True, exist_ok=True)
    record.touch()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[verifier_server.ADDRESS] = f"{folder}/verifier"
        os.environ[verifier_server.OWNER] = str(os.getpid())
        verifier_server.start_server()
        _explore(Path(folder), arguments, record)
    _print_table(record)


def _explore(folder: Path, arguments: argparse.Namespace, record: Path) -> None:
    with Server(PLAIN) as plain, Server(WITH_TORCH) as with_torch:
        ground = Ground(folder, plain=plain, with_torch=with_torch)
        strategies = kinds(ground)
        sizes = {
            name: max(1, arguments.cases * share // 100)
            for name, (share, _) in strategies.items()
            if arguments.only in (None, name)
        }
        finished = {(line["name"], line["batch"]) for line in _lines(record)}
        for name, number, size in _batches(sizes):
            if (name, number) not in finished:
                violations = Counter[str]()
                batch_seed = arguments.seed * 1_000_000 + number
                num_run = _run_batch(name, strategies[name][1], ground, size, batch_seed, violations, arguments.into)
                with record.open("a") as file:
                    line = {"name": name, "batch": number, "cases": num_run, "violations": violations}
                    file.write(json.dumps(line) + "\n")


def _batches(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield name, number and size of every batch: the first of each kind, then the second of each, and so on."""
    for number in range(-(-max(sizes.values()) // BATCH)):
        for name, size in sizes.items():
            if number * BATCH < size:
                yield name, number, min(BATCH, size - number * BATCH)


def _run_batch(
    name: str, strategy: Strategy, ground: Ground, size: int, batch_seed: int, violations: Counter[str], into: Path
) -> int:
    num_run = 0

    @seed(batch_seed)
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        nonlocal num_run
        num_run += 1
        violation = ground.violation(case)
        if violation is not None:
            violations[signature(violation)] += 1
            if violations[signature(violation)] == 1:
                stem = f"{name.replace(' ', '-')}-{batch_seed}-{num_run}"
                (into / f"{stem}.json").write_text(case.to_json())
                (into / f"{stem}.txt").write_text(violation)

    run()
    return num_run


def _lines(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines() if line.endswith("}")]


def _print_table(record: Path) -> None:
    cases, violations = Counter[str](), Counter[tuple[str, str]]()
    for line in _lines(record):
        cases[line["name"]] += line["cases"]
        violations.update({(line["name"], text): count for text, count in line["violations"].items()})
    for name, count in cases.items():
        print(f"{count:7,d}  {name}")
    print(f"{cases.total():7,d}  cases in all, {violations.total()} violations")
    for (name, text), count in violations.most_common():
        print(f"{count:7,d}  {name}: {text}")


def signature(violation: str) -> str:
    """Return what makes two violations the same: the sentence, and of a traceback its last position and its error."""
    first, _, rest = violation.partition("\n")
    positions = re.findall(r'File "[^"]*?(finetune/[^"]+)", line (\d+)', rest)
    last = rest.strip().rpartition("\n")[2]
    where = ":".join(positions[-1]) if positions else ""
    text = f"{first} | {where} | {last if 'traceback' in first or 'exit code' in first else ''}"
    varying = r"0x[0-9a-f]+" if positions else r"/\S+|\d{3,}|0x[0-9a-f]+"
    return re.sub(varying, "#", text)[:220]


if __name__ == "__main__":
    main()
