"""Runs many faults: `python -m tests.faults --count 200 --seed 0`, which resumes where it was stopped."""

import argparse
import os
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="faults that have to strike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this chain alone")
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="finetune-faults-"))
    os.environ["FINETUNE_TESTS_OWNER"] = str(os.getpid())
    os.environ["FINETUNE_TESTS_WARM"] = str(folder / "warm")
    from tests.faults.runner import Ground
    from tests.faults.schedule import draw_chain
    ground = Ground(folder)
    n, num = 0, asked.first if asked.only is None else asked.only
    while n < asked.count:
        chain = draw_chain(asked.seed, num)
        if True:
            out = ground.run(chain)
            n += len(out.struck)
            print(f"chain {num}: {out.seconds:.1f} s, {len(out.struck)}/{len(chain.faults)} struck, total {n}", "lora" if chain.adapter else "", "VIOLATION" if out.violations else "", flush=True)
            for a in chain.attempts: print("     ", a.place, [str(f) for f in a.faults])
            for s in out.notes: print("   ", s)
            for s in out.violations: print("   !!", s)
        if asked.only is not None: break
        num += 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
