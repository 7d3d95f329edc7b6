"""Tries every model type of transformers for every task from a tiny config, and prints which train.

The page is docs/reference/models.md.

    python benchmarks/model_table.py                                    # about an hour on two cores; resumes
    python benchmarks/model_table.py --tasks causal --only llama bert   # these only, tried again
    python benchmarks/model_table.py --page docs/reference/models.md    # the page from the recorded results
    python benchmarks/model_table.py --decay docs/reference/models.md   # its section on weight decay alone, minutes

Each case is `finetune train` in a fork of a process that has imported everything, under limits of CPU time and memory:
two steps of full fine-tuning on samples of different lengths, and an export that a fresh process verifies. A second run
takes the first step with one sample per microbatch: its loss must be the same. A case is `trained`, `refused` (exit
code 2 and one message) or `failed`. Small models come from their configs, as `finetune rehearse` shrinks them, with
random weights: nothing is downloaded. Results are appended to FOLDER/results.jsonl, from which the script resumes.
"""

import argparse
import gc
import importlib
import json
import os
import random
import re
import resource
import runpy
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # found by the line above
import transformers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from finetune.commands.rehearse.small_model import from_config_values, shrink_architecture  # noqa: E402
from finetune.config.sections.model import (  # noqa: E402
    FromConfigSection,
    ModelSection,
    TokenizerSection,
    TrainTokenizerSection,
)
from finetune.errors import FinetuneError  # noqa: E402
from finetune.export.verify import verifier  # noqa: E402
from finetune.model.layers import LAYER_COUNTS, shorten_config  # noqa: E402
from finetune.model.loading.architecture import HEADS  # noqa: E402
from finetune.train.optim.parameter_groups import list_parameters  # noqa: E402
from tests import verifier_server  # noqa: E402
from tests.task_cases import classification, images, masked_lm, seq2seq  # noqa: E402
from tests.task_cases import embedding as embedding_cases  # noqa: E402
from tests.warm import MODULES  # noqa: E402

TOLERANCE = 1e-5
CPU_SECONDS, MEMORY_BYTES = 90, 6 << 30
TRAINED, REFUSED, FAILED = "trained", "refused", "failed"


@dataclass(frozen=True)
class Column:
    """A task of the table: its mapping in transformers, the head it trains, and its job."""

    mapping: str
    head: str
    task: Mapping[str, Any]
    tokenizer: str | None = None  # folder of the one to use, with special tokens; None: one is trained

    def model_types(self) -> list[str]:
        """Return the model types of the mapping; of that of all bodies those that some text task trains."""
        names = set(getattr(modeling_auto, f"{self.mapping}_MAPPING_NAMES"))
        if self.head == "embedding":
            texts = [each for each in COLUMNS.values() if each.head not in ("embedding", "image_classification")]
            names &= {name for each in texts for name in each.model_types()}
        return sorted(names)


COLUMNS: Mapping[str, Column] = {
    "causal": Column("MODEL_FOR_CAUSAL_LM", "causal_lm", {"name": "sft"}),
    "masked": Column("MODEL_FOR_MASKED_LM", "masked_lm", {"name": "masked_lm"}, "masked"),
    "classification": Column(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION", "sequence_classification", {"name": "text_classification"}, "masked"
    ),
    "tokens": Column("MODEL_FOR_TOKEN_CLASSIFICATION", "token_classification", {"name": "token_classification"}),
    "seq2seq": Column("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "seq2seq_lm", {"name": "seq2seq"}),
    "images": Column("MODEL_FOR_IMAGE_CLASSIFICATION", "image_classification", {"name": "image_classification"}),
    "embedding": Column("MODEL", "embedding", {"name": "embedding"}),
}

_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_TINY = {**_GROUPED, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 512}
_SHARED_LAYERS = {
    **_TINY,
    **{"num_hidden_layers": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "sliding_window": 64},
    "vocab_size_per_layer_input": 320,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}

VALUES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {**_SMALL, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {**_GROUPED, "rope_parameters": {"full_attention": None}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {
        **_SHARED_LAYERS,
        **{"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
        **{"laurel_rank": 8, "altup_num_inputs": 2},
    },
    "gemma4": {"text_config": _SHARED_LAYERS},
    "gemma4_text": _SHARED_LAYERS,
    "granitemoehybrid": {
        **{**_TINY, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "lfm2": {**_TINY, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "longcat_flash": {"expert_ffn_hidden_size": 64},
    "reformer": {
        "axial_pos_embds": False,
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "max_position_embeddings": 64,
    },
    "mistral4": {**_SMALL, "num_key_value_heads": 4, **_LATENT, "n_routed_experts": 4, "moe_intermediate_size": 16},
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_blocks": 1, "num_self_attends_per_block": 2},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2},
    "zamba": {**_SMALL, "num_hidden_layers": 12, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {**_SMALL, "num_hidden_layers": 7, "hybrid_layer_ids": [6], "mamba_d_state": 16, "n_mamba_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "rembert": {"output_embedding_size": 64, "input_embedding_size": 32},
    "qwen4_exp_text": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, **_SMALL},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
}
"""Values of types that the general shrinking leaves too large, or whose default config does not fit itself."""


OWN_TOKENIZER = ("qwen2",)
"""Types beside which transformers loads every tokenizer as theirs."""


@dataclass(frozen=True)
class Result:
    """What became of a model type in a task."""

    task: str
    model_type: str
    outcome: str
    message: str = ""
    layout: str = ""
    losses: tuple[float, ...] = ()  # of the first step: the whole batch at once, one sample at a time
    version: str = transformers.__version__


def main() -> int:
    """Run what is missing, print or write the page and return the exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--only", nargs="*", metavar="TYPE", help="try these again, whatever is recorded")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/model-table"))
    parser.add_argument("--page", type=Path, help="only write the page from what is recorded")
    parser.add_argument("--decay", type=Path, metavar="PAGE", help="only renew the page's section on weight decay")
    options = parser.parse_args()
    folder = options.folder.absolute()
    if (target := options.page or options.decay) is not None:
        text = target.read_text() if options.page is None else page(read_results(folder))
        types = sorted({name for column in COLUMNS.values() for name in column.model_types()})
        target.write_text(text.partition(f"\n{DECAY}")[0] + decay_section({name: decay_of(name) for name in types}))
        return 0
    recorded = {(each.task, each.model_type) for each in read_results(folder)}
    cases = [(task, model_type) for task in options.tasks for model_type in COLUMNS[task].model_types()]
    missing = [case for case in cases if (case[1] in options.only if options.only else case not in recorded)]
    failures = 0
    for result in try_cases(missing, folder=folder):
        print(f"{result.task} {result.model_type}: {result.outcome} {result.message}"[:600], flush=True)
        failures += result.outcome == FAILED
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    return 1 if failures else 0


def read_results(folder: Path) -> list[Result]:
    """Return the last result of every case."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    latest = {(each["task"], each["model_type"]): Result(**each) for each in map(json.loads, lines)}
    return [latest[case] for case in sorted(latest)]


def try_cases(cases: Sequence[tuple[str, str]], *, folder: Path) -> Iterator[Result]:
    """Yield what becomes of each case, tried in a fork of this process."""
    write_data(folder / "data")
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in MODULES:
        if "deepspeed" not in name:
            importlib.import_module(name)
    address = folder / f"verifier-{os.getpid()}"
    os.environ |= {verifier_server.ADDRESS: str(address), verifier_server.OWNER: str(os.getpid())}
    verifier_server.use_server(verifier)
    gc.collect()
    gc.freeze()
    for task, model_type in cases:
        yield try_case(task, model_type, folder)


def try_case(task: str, model_type: str, folder: Path) -> Result:
    """Train, export and verify the model type in the task, and compare its first step with one sample at a time."""
    place = folder / "runs" / f"{task}-{model_type}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result = partial(Result, task, model_type)
    in_fork(lambda: write_job(task, model_type, place, data=folder / "data"), log=place / "config.log")
    if not (place / "job.yaml").exists():
        return result(FAILED, f"no config: {last_line(place / 'config.log')}")
    code = in_fork(lambda: train(place, "whole"), log=place / "whole.log")
    log = (place / "whole.log").read_text(errors="replace")
    result = partial(result, layout="".join(re.findall(r"padding-free batches|samples are padded.*", log)[:1]))
    if code == 2:
        messages = re.findall(r"^error: .*(?:\n .*)*", log, re.MULTILINE)
        if "allocate memory" in messages[0]:
            return result(FAILED, f"too large: {last_line(place / 'config.log')}")
        is_one = len(messages) == 1 and "Traceback" not in log
        return result(REFUSED if is_one else FAILED, messages[0] if messages else log[-300:])
    if code != 0:
        return result(FAILED, f"exit code {code}: {last_line(place / 'whole.log')}")
    if "verified in a fresh process" not in log:
        return result(FAILED, "not verified")
    code = in_fork(lambda: train(place, "single"), log=place / "single.log")
    if code != 0:
        return result(FAILED, f"exit code {code} at one sample at a time: {last_line(place / 'single.log')}")
    losses = (first_loss(place / "whole"), first_loss(place / "single"))
    shutil.rmtree(place)
    if "draws random numbers" in log:
        return result(TRAINED, ", random", losses=losses)
    if abs(losses[0] - losses[1]) > TOLERANCE * abs(losses[1]):
        return result(FAILED, f"losses {losses[0]:.6f} and {losses[1]:.6f}", losses=losses)
    return result(TRAINED, losses=losses)


def in_fork(work: Any, *, log: Path) -> int:
    """Do the work in a child with limits, its output in the log; return its exit code, or minus its signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            output = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = work()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(place: Path, name: str) -> int:
    """Run `finetune train` as typed: `whole`, or `single` with one step, one sample at a time and no verification."""
    os.chdir(place)
    torch.nn.functional.dropout = lambda states, *_, **__: states  # of heads whose config does not tell it
    single = ["train.microbatch_size=1", "train.steps=1", "export.verify=false"] if name == "single" else []
    sets = [word for value in [f"run.folder={place / name}", *single] for word in ("--set", value)]
    sys.argv = ["finetune", "train", "--config", "job.yaml", *sets]
    runpy.run_module("finetune", run_name="__main__", alter_sys=True)
    return 0


def write_job(task: str, model_type: str, place: Path, *, data: Path) -> int:
    """Write the job of the case: the model small, without dropout, so that runs can be compared."""
    column = COLUMNS[task]
    is_image = task == "images"
    is_given = column.tokenizer and model_type not in OWN_TOKENIZER
    tokenizer = {"name": str(data / column.tokenizer / "tokenizer")} if is_given else None
    values, image_size = tiny_values(model_type, head=column.head)
    text = {"tokenizer": tokenizer or {"train": {"vocabulary_size": 320}}}
    model = {"image_processor": {"size": image_size}} if is_image else text
    source = {"path": str(data / task / ("train" if is_image else "train.txt" if task == "masked" else "train.jsonl"))}
    chat = {"chat_template": "chatml"} if task == "causal" else {}
    job = {
        "run": {"folder": "run", "seed": 7},
        "model": {"from_config": {"model_type": model_type, "values": values}, **model},
        "data": {"train": source, **chat, **({} if is_image else {"max_length": 64}), "cache_folder": "cache"},
        "task": column.task,
        "train": {"global_batch_size": 4, "microbatch_size": 4, "steps": 2, "learning_rate": 0.001},
        "report": {"console": "plain", "log_every_steps": 1},
    }
    (place / "job.yaml").write_text(json.dumps(job, indent=1))  # JSON is YAML
    return 0


def tiny_values(model_type: str, *, head: str) -> tuple[dict[str, Any], int]:
    """Return `model.from_config.values` of a small model, as `finetune rehearse` makes it, and its images' size."""
    given = VALUES.get(model_type, {})
    section = FromConfigSection(model_type=model_type, values=dict(given))
    tokenizer = (
        None if head == "image_classification" else TokenizerSection(train=TrainTokenizerSection(vocabulary_size=320))
    )
    try:
        made = shrink_architecture(ModelSection(from_config=section, tokenizer=tokenizer), head=head)
    except FinetuneError as error:  # the job with the type's own sizes says so, too, or meets the limits
        print(f"NOT SMALL: {error}")
        return dict(given), 32
    values = from_config_values(section, made)
    config = made.config.to_dict()
    size = config.get("image_size")
    return without_dropout(config, values), size if isinstance(size, int) else 32


def without_dropout(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with every probability of dropout in the config, also one level down, at zero."""
    result = dict(values)
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            inner = without_dropout(value, result.get(name) or {})
            result |= {name: inner} if inner else {}
        elif re.search(r"drop|jitter", name) and isinstance(value, float) and value > 0:
            result[name] = 0.0
    return result


def write_data(folder: Path) -> None:
    """Write the rows of every task, of different lengths."""
    staging = folder.with_name(f"data-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    for task in COLUMNS:
        (staging / task).mkdir(parents=True)
    masked_lm.lines(staging / "masked")
    tokenizer = AutoTokenizer.from_pretrained(staging / "masked" / "tokenizer")
    tokenizer.add_special_tokens({"bos_token": "[CLS]", "eos_token": "[SEP]"})  # some classify by the last token
    tokenizer.save_pretrained(staging / "masked" / "tokenizer")
    for task in ("causal", "seq2seq"):
        seq2seq.reversals(staging / task)
    classification.write(staging / "classification", row=classification.one_class)
    chance = random.Random(1)
    rows = [chance.choices(classification.WORDS, k=chance.randint(2, 8)) for _ in range(60)]
    tagged = [{"tokens": row, "tags": ["LONG" if len(word) > 4 else "SHORT" for word in row]} for row in rows]
    (staging / "tokens" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))
    images.shapes(staging / "images")
    embedding_cases.write(staging / "embedding", kind="pairs")
    staging.rename(folder)


def first_loss(folder: Path) -> float:
    """Return the loss of the run's first step."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return next(float(each["loss"]) for each in events if each.get("event") == "StepTaken")


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["nothing"])[-1][:400]


HEADER = """# Which models, which tasks

Made by `benchmarks/model_table.py` with transformers {version}; do not edit. {num_trained} of {num_cases} pairs of a
model type and a task that transformers has a head for were trained, whole and from a tiny config: two steps on samples
of different lengths, the export verified in a fresh process, and the loss of the first step the same with one sample
per microbatch. Another {num_missing} pairs were not tried (`?`); `embedding` is asked of the types of the text tasks.

`free`: samples share rows without padding ([speed](../concepts/speed.md)). `padded`: they are padded; the number
below gives the reason, and without a number the task always pads. `random`: the model draws random numbers besides
dropout, so that its loss differs by chance. `images` have one size. `refused`, `failed`: below. Empty: transformers
has no such head.
"""


def page(results: Sequence[Result]) -> str:
    """Return docs/reference/models.md."""
    known = {task: set(column.model_types()) for task, column in COLUMNS.items()}
    by_type: dict[str, dict[str, Result]] = defaultdict(dict)
    for each in results:
        if each.model_type in known[each.task]:
            by_type[each.model_type][each.task] = each
    kept = [each for row in by_type.values() for each in row.values()]
    reasons = [why for why, _ in Counter(filter(None, map(why_padded, kept))).most_common()]
    count = sum(each.outcome == TRAINED for each in kept)
    missing = sum(map(len, known.values())) - len(kept)
    version = kept[0].version if kept else transformers.__version__
    lines = [HEADER.format(version=version, num_trained=count, num_cases=len(kept), num_missing=missing)]
    lines += [f"| model type | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for model_type, row in sorted(by_type.items()):
        if any(each.outcome == TRAINED for each in row.values()):
            others = {task: "?" if model_type in names else "" for task, names in known.items()}
            cells = [cell(row[task], reasons) if task in row else others[task] for task in COLUMNS]
            lines.append(f"| {model_type} | {' | '.join(cells)} |")
    lines += ["", "## Why samples are padded", "", *(f"{at}. {why}" for at, why in enumerate(reasons, start=1))]
    lines += ["", "## Refused", "", "One message and exit code 2, before or at the first step.", ""]
    lines += grouped(each for each in kept if each.outcome == REFUSED)
    lines += [
        "",
        "## Failed",
        "",
        "An error in another way, a loss that padding changes, or (`too large`) no tiny config was found: not tried.",
        "",
    ]
    lines += grouped(each for each in kept if each.outcome == FAILED)
    return "\n".join(lines) + "\n"


def cell(result: Result, reasons: Sequence[str]) -> str:
    """Return the cell of a case."""
    if result.outcome != TRAINED:
        return result.outcome
    if result.task == "images":
        return "yes"
    why = why_padded(result)
    number = f" {reasons.index(why) + 1}" if why else ""
    return ("free" if result.layout.startswith("padding-free") else f"padded{number}") + result.message


def why_padded(result: Result) -> str:
    """Return why samples of a case that trained are padded, without the model's name; empty where they are not."""
    if result.outcome != TRAINED or not result.layout.startswith("samples are padded"):
        return ""
    return re.sub(r"^`[\w-]+`:? ", "", result.layout.partition(": ")[2])


def grouped(results: Iterable[Result]) -> list[str]:
    """Return a line for each message, the model's name left out, with its model types and tasks."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for each in results:
        text = re.sub(r"^error: |job\.yaml has 1 problem\s+line \d+, |model\.from_config\.values: ", "", each.message)
        text = re.sub(rf"(?<!\w){re.escape(each.model_type)}(?!\w)", "TYPE", " ".join(text.split()))
        text = re.sub(
            r"losses [\d.]+ and [\d.]+", "other loss with one sample per microbatch: it reads its padding", text
        )
        text = re.sub(r" \(here by [^)]*\)", "", text)
        groups[text[:200].removesuffix(" Change or remove the value.")].append(each)
    return [
        f"- {text}: " + ", ".join(f"{each.model_type} ({each.task})" for each in group)
        for text, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


Decay = tuple[tuple[str, ...], tuple[str, ...]]
"""A type's parameters of two and more dimensions without weight decay, and the decayed ones besides layers' weights."""

DECAY = """
## Weight decay

`train.optimizer.weight_decay` reaches the weights of linear layers, convolutions and embeddings. It does not reach
parameters of one dimension, nor biases, norms, scales and vectors of channels that are stored with more (the second
column). The third column has what else is decayed. Read from the default config of each type; types that are not listed
have nothing but weights and parameters of one dimension.

| model types | not decayed | decayed, too |
|---|---|---|
"""


def decay_of(model_type: str) -> Decay | None:
    """Return what weight decay does to the type's parameters; None where its default config gives no model."""
    column = next(each for each in COLUMNS.values() if model_type in each.model_types())
    for shortens in (True, False):
        try:
            config = transformers.AutoConfig.for_model(model_type, **VALUES.get(model_type, {}))
            if shortens:
                values = vars(config)
                counts = {values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)}
                shorten_config(values, (0, 1), lengths={count for count in counts if count > 2})
            with torch.device("meta"):
                model = HEADS[column.head].from_config(config)
            break
        except Exception as error:  # of any type's code
            print(f"{model_type}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
    else:
        return None
    spared, decayed = set[str](), set[str]()
    for entry in list_parameters(model):
        owner, _, own = entry.name.rpartition(".")
        is_layer = own == "weight" and isinstance(model.get_submodule(owner), LAYERS)
        label = f"{owner.rpartition('.')[2]}.weight" if own == "weight" else own
        if entry.parameter.dim() > 1 and entry.is_vector:
            spared.add(label)
        elif entry.parameter.dim() > 1 and not is_layer:
            decayed.add(label)
    return tuple(sorted(spared)), tuple(sorted(decayed))


LAYERS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd, Conv1D)


def decay_section(decays: Mapping[str, Decay | None]) -> str:
    """Return the section, with a line for all types that are alike."""
    groups: dict[Decay, list[str]] = defaultdict(list)
    for model_type, decay in decays.items():
        if decay is not None and any(decay):
            groups[decay].append(model_type)
    lines = [
        f"| {', '.join(types)} | {' | '.join(' '.join(f'`{name}`' for name in names) for names in decay)} |"
        for decay, types in sorted(groups.items(), key=lambda item: (not item[0][0], item[1]))
    ]
    unread = ", ".join(model_type for model_type, decay in decays.items() if decay is None)
    return DECAY + "\n".join(lines) + f"\n\nTheir default config gives no model: {unread}.\n"


if __name__ == "__main__":
    sys.exit(main())
