"""One contestant of prepare.py, in a process of its own: prints what it did as one line of JSON.

    python benchmarks/prepare_worker.py WHO ROWS TOKENIZER WORKERS SCRATCH

`ours`, `map` (datasets.map) or `trl` tokenise the rows; `write` writes a set of 10^8 generated tokens, `open` opens it.
The clock starts when everything is imported and the tokenizer is loaded.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # processes that tokenise import this file, too; `python -m finetune` asks no more of them
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from finetune.config.sections.data import DataSection, TrainingSourceSection
    from finetune.config.sections.task import TaskSection
    from finetune.data.encoding.conversation import tokenizer_identity
    from finetune.data.sources.source import open_source
    from finetune.data.token_cache.build import PreparedSetWriter
    from finetune.data.token_cache.cache import prepare_set
    from finetune.data.token_cache.chunks import Chunk
    from finetune.data.token_cache.counts import Counts
    from finetune.data.token_cache.store import Identity, PreparedSet
    from finetune.task.protocol import TaskContext
    from finetune.task.registry import build_task

NUM_TOKENS, TOKENS_PER_SAMPLE, SAMPLES_PER_CHUNK = 10**8, 200, 10_000
NUM_LOOKED_UP = 20_000


def main() -> None:
    """Do what the words say."""
    who, rows, tokenizer, workers, scratch = sys.argv[1:]
    contestants: dict[str, Callable[..., dict[str, Any]]] = {"ours": _ours, "map": _map, "trl": _trl}
    if who in contestants:
        result = contestants[who](Path(rows), Path(tokenizer), int(workers), Path(scratch))
    else:
        result = _write(Path(scratch)) if who == "write" else _open(Path(scratch))
    print(json.dumps(result))


def _ours(rows: Path, tokenizer: Path, workers: int, scratch: Path) -> dict[str, Any]:
    source = TrainingSourceSection(path=str(rows), format="messages")
    section = DataSection(
        train=source, max_length=512, cache_folder=str(scratch), prepare_workers=0 if workers == 1 else workers
    )
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    task = build_task(TaskContext(TaskSection(name="sft"), section, loaded))
    clock = _Clock()
    opened = open_source(source, key="data.train", log=_nothing)
    identity = tokenizer_identity(loaded)
    prepared = prepare_set(opened, task.encoder, section=section, identity=identity, log=_nothing)
    return clock.read() | {"tokens": prepared.counts.tokens, "targets": prepared.counts.targets}


def _map(rows: Path, tokenizer: Path, workers: int, scratch: Path) -> dict[str, Any]:
    datasets = import_module("datasets")
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        texts = [loaded.apply_chat_template(turns, tokenize=False) for turns in batch["messages"]]
        return {"input_ids": loaded(texts, add_special_tokens=False)["input_ids"]}

    datasets.disable_progress_bars()
    clock = _Clock()
    dataset = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(scratch))
    num_proc = None if workers == 1 else workers
    made = dataset.map(encode, batched=True, remove_columns=dataset.column_names, num_proc=num_proc)
    return clock.read() | {"tokens": _num_tokens(made), "targets": 0}


def _trl(rows: Path, tokenizer: Path, workers: int, scratch: Path) -> dict[str, Any]:
    datasets, trl = import_module("datasets"), import_module("trl")
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    settings = trl.SFTConfig(
        output_dir=str(scratch / "trainer"),
        max_length=512,
        dataset_num_proc=None if workers == 1 else workers,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = SimpleNamespace(_tokenizer=loaded, chat_template=None, completion_only_loss=True)
    datasets.disable_progress_bars()
    clock = _Clock()
    dataset = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(scratch))
    made = trl.SFTTrainer._prepare_dataset(trainer, dataset, loaded, settings, False, None, "train")
    targets = sum(label != -100 for labels in made.select(range(10))["labels"] for label in labels)
    return clock.read() | {"tokens": _num_tokens(made), "targets": targets}


def _write(scratch: Path) -> dict[str, Any]:
    num_samples = NUM_TOKENS // TOKENS_PER_SAMPLE
    clock = _Clock()
    writer = PreparedSetWriter(scratch, Identity("generated", {}))
    for first in range(0, num_samples, SAMPLES_PER_CHUNK):
        writer.append(_generated(first))
    writer.finish()
    writer.close()
    return clock.read()


def _generated(first: int) -> "Chunk":
    num = SAMPLES_PER_CHUNK * TOKENS_PER_SAMPLE
    tokens = np.random.default_rng(first).integers(0, 32_000, num, dtype=np.uint32)
    lengths = np.full(SAMPLES_PER_CHUNK, TOKENS_PER_SAMPLE)
    return Chunk(
        values={"input_ids": tokens, "is_target": tokens % 2 == 0},
        lengths={"input_ids": lengths, "is_target": lengths},
        num_targets=np.full(SAMPLES_PER_CHUNK, TOKENS_PER_SAMPLE // 2, np.int32),
        digests=np.arange(first, first + SAMPLES_PER_CHUNK, dtype=np.uint64),
        checksums=np.arange(first, first + SAMPLES_PER_CHUNK, dtype=np.uint64),
        row_numbers=np.arange(first, first + SAMPLES_PER_CHUNK),
        origins=((0, "generated"),),
        counts=Counts(rows=SAMPLES_PER_CHUNK, samples=SAMPLES_PER_CHUNK, tokens=num),
    )


def _open(scratch: Path) -> dict[str, Any]:
    before, started = _resident_bytes(), time.perf_counter()
    prepared = PreparedSet(scratch)
    opened, after = time.perf_counter() - started, _resident_bytes()
    places = np.random.default_rng(0).permutation(len(prepared))[:NUM_LOOKED_UP].tolist()
    started = time.perf_counter()
    num_targets = sum(prepared[place].num_targets for place in places)
    looked_up = time.perf_counter() - started
    return {
        "tokens": prepared.counts.tokens,
        "open_seconds": opened,
        "open_bytes": after - before,
        "microseconds_per_sample": looked_up / len(places) * 1e6,
        "targets": num_targets,
    }


class _Clock:
    """Wall and CPU seconds of this process and its children since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, Any]:
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        wall, cpu = time.perf_counter() - self._wall, _cpu_seconds() - self._cpu
        return {"wall": wall, "cpu": cpu, "peak_bytes": peak * 1024}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _num_tokens(dataset: Any) -> int:
    column = dataset.data.column("input_ids")
    return sum(len(chunk.flatten()) for chunk in column.chunks)


def _nothing(line: str) -> None:
    pass


if __name__ == "__main__":
    main()
