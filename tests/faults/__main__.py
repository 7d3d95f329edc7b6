"""Runs many faults: `python -m tests.faults --count 200 --seed 0`. Started again, it resumes after the last run."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.record import Line, Record, describe_job, describe_places, page
from tests.faults.runner import Ground, Outcome
from tests.faults.schedule import Chain, chains, draw_chain
from tests.launching import ADDRESS, OWNER, ROOT, SETTINGS

PAGE = ROOT / "benchmarks" / "experiments" / "faults.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many faults have to strike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the chain of this number alone, and record nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the list is written")
    parser.add_argument("--record", type=Path, help="what is remembered between two starts")
    parser.add_argument(
        "--keep", action="store_true", help="resume although the source has changed since; what violated runs again"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks and hosts are given back
    folder = Path(tempfile.mkdtemp(prefix="finetune-faults-"))
    _use_warm_server(folder)
    ground = Ground(folder)
    if asked.only is not None:
        chain = draw_chain(asked.seed, asked.only)
        print(_planned(chain))
        outcome = ground.run(chain)
        print(format_outcome(outcome))
        return int(bool(outcome.violations))
    path = asked.record or ROOT / "runs" / f"faults-{asked.seed}.jsonl"
    record = Record(path, seed=asked.seed, source=_source(), keep=asked.keep)
    return _run_many(ground, record, count=asked.count, seed=asked.seed, page_path=asked.page)


def _run_many(ground: Ground, record: Record, *, count: int, seed: int, page_path: Path) -> int:
    if record.lines:
        print(f"resumes after {len(record.lines)} runs with {record.num_struck} faults")
    done = {line.number for line in record.lines}
    for chain in chains(seed):
        if record.num_struck >= count:
            break
        if chain.number in done:
            continue
        outcome = ground.run(chain)
        record.add(as_line(outcome))
        print(f"{record.num_struck:4d} of {count}  {format_outcome(outcome)}", flush=True)
        page_path.write_text(page(record.lines, seed=seed))
    num_wrong = sum(bool(line.violations) for line in record.lines)
    print(f"{record.num_struck} faults in {len(record.lines)} runs: {num_wrong} with violations. {page_path}")
    return int(num_wrong > 0)


def as_line(outcome: Outcome) -> Line:
    """Return what is remembered of an outcome."""
    chain = outcome.chain
    return Line(
        number=chain.number,
        job=describe_job(chain),
        places=describe_places(chain),
        struck=tuple(outcome.struck),
        notes=tuple(outcome.notes),
        violations=tuple(outcome.violations),
        skipped=outcome.skipped,
        num_attempts=outcome.num_attempts,
        seconds=round(outcome.seconds, 1),
    )


def format_outcome(outcome: Outcome) -> str:
    """Return what became of a chain: a line, what befell it and how its attempts ended; how to see a violation."""
    chain = outcome.chain
    skipped = f", {outcome.skipped}" if outcome.skipped else ""
    lines = [
        f"chain {chain.number} ({describe_job(chain)}; {describe_places(chain)}): {len(outcome.struck)} of "
        f"{len(chain.faults)} faults struck, {outcome.seconds:.0f} s{skipped}",
        *(f"    {fault}" for fault in outcome.struck),
        *(f"      {note}" for note in outcome.notes),
        *(f"  VIOLATION: {problem}" for problem in outcome.violations),
    ]
    if outcome.violations:
        lines.append(f"  seed {chain.seed}; again: {chain.command}")
    return "\n".join(lines)


def _planned(chain: Chain) -> str:
    return "\n".join(
        f"planned  {attempt.place}: {'; '.join(map(str, attempt.faults)) or 'nothing'}" for attempt in chain.attempts
    )


def _use_warm_server(folder: Path) -> None:
    """Have launches fork a process that has imported everything; see tests/launching.py."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ[OWNER], os.environ[ADDRESS] = str(os.getpid()), str(folder / "warm")


def _source() -> str:
    """Return what identifies the source that runs: the commit; changes that are not committed do not count."""
    asked = ["git", "rev-parse", "HEAD"]
    ended = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
