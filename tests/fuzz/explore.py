"""Runs many cases and collects what breaks the property: `python -m tests.fuzz.explore --cases 10000 --seed 1`.

Each kind of violation is written once, as a file that `test_findings.py` runs when it is moved into `findings/`.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.cases import Case, Ground
from tests.fuzz.forked import PLAIN, WITH_TORCH, Server
from tests.fuzz.strategies import Strategy, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind of case")
    parser.add_argument("--into", type=Path, default=Path("fuzz-findings"))
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Server(PLAIN) as plain, Server(WITH_TORCH) as with_torch:
        ground = Ground(Path(folder), plain=plain, with_torch=with_torch)
        for name, (share, strategy) in kinds(ground).items():
            if asked.only in (None, name):
                _explore(name, strategy, ground, num_cases=max(1, asked.cases * share // 100), asked=asked)


def _explore(name: str, strategy: Strategy, ground: Ground, *, num_cases: int, asked: argparse.Namespace) -> None:
    found: Counter[str] = Counter()
    num_run = 0

    @seed(asked.seed)
    @settings(
        max_examples=num_cases,
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
            kind = signature(violation)
            found[kind] += 1
            if found[kind] == 1:
                stem = asked.into / f"{name.replace(' ', '-')}-{asked.seed}-{num_run}"
                stem.with_suffix(".json").write_text(case.to_json())
                stem.with_suffix(".txt").write_text(violation)

    began = time.monotonic()
    run()
    print(f"{name}: {num_run} cases in {time.monotonic() - began:.0f} s, {len(found)} kinds of violation", flush=True)
    for kind, count in found.most_common():
        print(f"  {count:5d}  {kind}", flush=True)


def signature(violation: str) -> str:
    """Return what makes violations one kind: the sentence, and of a traceback its last place and its error."""
    first, _, rest = violation.partition("\n")
    places = re.findall(r'File "[^"]*?(finetune/[^"]+)", line (\d+)', rest)
    last = rest.strip().rpartition("\n")[2]
    where = ":".join(places[-1]) if places else ""
    text = f"{first} | {where} | {last if 'traceback' in first or 'exit code' in first else ''}"
    return (
        re.sub(r"/\S+|\d{3,}|0x[0-9a-f]+", "#", text)[:220] if not places else re.sub(r"0x[0-9a-f]+", "#", text)[:220]
    )


if __name__ == "__main__":
    main()
