"""Step time against the number of GPUs: where each strategy stops paying, and the model beside published runs.

    python benchmarks/scaling.py                                 # all tables of docs/proof/scaling.md, as text
    python benchmarks/scaling.py --gpu A100-80GB --network-gbit 800 --model 8B [--global-batch 1024] [--samples 2]
    python benchmarks/scaling.py --facts doctor.json --model job.yaml
    python benchmarks/scaling.py --plot curves.png               # needs the extra `plots`
    python benchmarks/scaling.py --fit                           # the one fitted number, without each source in turn
    python benchmarks/scaling.py --gloo                          # steps of this machine's processes beside the model
    python benchmarks/scaling.py --markdown                      # writes the tables into docs/proof/scaling.md

`--json` prints the chosen tables as JSON. `--model` is 1B, 8B or 70B of Llama 3, or a job file. `--facts` is what
`finetune doctor --json` printed on the machines; `--gpu` then names the kind of GPU whose memory bandwidth is taken.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from finetune.commands.doctor.checks import read_facts  # noqa: E402  # found by the line above
from finetune.config.load import load_config  # noqa: E402
from finetune.errors import FinetuneError, UserError  # noqa: E402
from finetune.model.loading.architecture import load_model_config  # noqa: E402
from finetune.model.size import read_shapes  # noqa: E402

from scaling_model.curves import Load  # noqa: E402
from scaling_model.gloo import measure  # noqa: E402
from scaling_model.machines import Machine, listed, measured, usual  # noqa: E402
from scaling_model.models import BY_NAME, Model, model_of  # noqa: E402
from scaling_model.tables import Table, curve_table, fit_table, page_tables, paying_table  # noqa: E402

PAGE = ROOT / "docs" / "proof" / "scaling.md"


def main() -> int:
    """Print what was asked for; return 0, or 2 for a mistake in the options."""
    options = _options()
    try:
        if options.markdown:
            PAGE.write_text(filled(PAGE.read_text()))
            return 0
        if options.plot is not None:
            _plot(options)
            return 0
        tables = _tables(options)
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({name: each.records() for name, each in tables.items()}, indent=1))
    else:
        print("\n\n".join(f"{name}\n{table.text()}" for name, table in tables.items()))
    return 0


def filled(page: str) -> str:
    """Return the page with each table between its marks; raises UserError for marks without a table."""
    tables = page_tables()

    def table(found: re.Match[str]) -> str:
        if found[1] not in tables:
            raise UserError(f"docs/proof/scaling.md: there is no table `{found[1]}`. There are: {', '.join(tables)}.")
        return f"<!-- table {found[1]} -->\n{tables[found[1]].markdown()}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def _tables(options: argparse.Namespace) -> Mapping[str, Table]:
    if options.fit:
        return {"STRAGGLER_NOISE, fitted without one source": fit_table()}
    if options.gloo:
        return {"steps over gloo": _gloo_table()}
    if options.gpu is None and options.facts is None and options.model is None:
        return page_tables()
    name, model = _model(options.model or "8B")
    load = Load(samples=options.samples, length=options.length, global_batch=options.global_batch)
    machines = _machines(options)
    tables = {f"{name} on {each.name}: efficiency (step)": curve_table(model, each, load) for each in machines}
    return {**tables, "GPUs up to which 80% / 50% of a step compute": paying_table(machines, load, {name: model})}


def _machines(options: argparse.Namespace) -> tuple[Machine, ...]:
    if options.facts is not None:
        facts = read_facts(options.facts)
        return (measured(facts, gpu=options.gpu, network_gbit=options.network_gbit),)
    if options.gpu is None:
        return usual()
    return (listed(options.gpu, per_node=options.gpus_per_node, network_gbit=options.network_gbit),)


def _model(name: str) -> tuple[str, Model]:
    """Return a model of Llama 3 by its size, or that of a job file; raises UserError."""
    if name in BY_NAME:
        return name, BY_NAME[name]
    if not Path(name).is_file():
        raise UserError(f"--model: `{name}` is none of {', '.join(BY_NAME)} and no job file.")
    config = load_model_config(load_config(Path(name), []).config.model)
    shapes = read_shapes(config)
    if shapes is None:
        raise UserError(f"--model {name}: its model's config has no sizes of a decoder.")
    return Path(name).stem, model_of(shapes, is_tied=bool(getattr(config, "tie_word_embeddings", False)))


def _gloo_table() -> Table:
    rows = []
    for each in measure():
        cells = [
            f"{seconds * 1e3:.1f} / {each.modeled[name] * 1e3:.1f} ms = {seconds / each.modeled[name]:.2f}"
            for name, seconds in each.steps.items()
        ]
        speed = f"{each.bytes_per_second / 1e9:.2f} GB/s" if each.steps else ""
        rows.append((str(each.world), f"{each.computed * 1e3:.1f} ms", speed, *(cells or ["", ""])))
    return Table(("ranks", "step without communication", "bus bandwidth", "ddp measured / modeled", "fsdp2"), rows)


def _plot(options: argparse.Namespace) -> None:
    from scaling_model.plot import draw  # matplotlib is in the extra `plots`

    name, model = _model(options.model or "8B")
    load = Load(samples=options.samples, length=options.length, global_batch=options.global_batch)
    draw(options.plot, name, model, _machines(options), load)


def _count(text: str) -> int:
    """Return a number of at least 1; raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no number of at least 1")
    return int(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="a kind of GPU of finetune/runtime/gpu_specifications.yaml")
    parser.add_argument("--gpus-per-node", type=_count, default=8)
    parser.add_argument("--network-gbit", type=float, help="between machines, of a whole machine")
    parser.add_argument("--facts", type=Path, help="what `finetune doctor --json` printed")
    parser.add_argument("--model", help="1B, 8B, 70B, or a job file")
    parser.add_argument("--length", type=_count, default=4096, help="tokens of a sample")
    parser.add_argument("--samples", type=_count, default=1, help="of a microbatch, at most")
    parser.add_argument(
        "--global-batch", type=_count, help="samples of all ranks together; without it, each adds its own"
    )
    for flag in ("--markdown", "--json", "--fit", "--gloo"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
