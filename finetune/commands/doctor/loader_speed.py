"""`finetune doctor --data`: measure the job's data loader with several numbers of workers, and recommend one."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from finetune.commands.printing import number_table, print_table
from finetune.config.load import load_config
from finetune.data.batch import Batch
from finetune.data.loader import machine_resources, train_loader
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_training_data
from finetune.runtime.text.terminal import quiet_libraries

NEARLY_FASTEST = 0.9
"""Share of the fastest rate that counts as equally fast."""

MIN_BATCHES = 4


def examine_loader(path: Path, overrides: Sequence[str], *, seconds: float) -> None:
    """Print the tokens per second of the job's loader by number of workers, and the key to write.

    Tokenizes first, as training does. Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config, resources = loaded.config, machine_resources()
    training_data = make_training_data(config, RunLog(is_main=True), locations=loaded.sources)
    table = number_table("num_workers", "tokens/s")
    rates: dict[int, float] = {}
    for number in numbers_to_try(resources.cores_per_rank):
        print(f"measuring num_workers: {number}", file=sys.stderr, flush=True)
        loader = train_loader(
            training_data.training,
            training_data.task.collate,
            global_batch_size=config.train.global_batch_size,
            microbatch_size=config.train.known_microbatch_size,
            first_step=0,
            num_steps=1 << 40,  # only the first are used
            section=config.data.model_copy(update={"num_workers": number, "persistent_workers": False}),
            seed=config.run.seed,
            has_partners=training_data.task.samples.has_partners,
        )
        rates[number] = _tokens_per_second(loader, seconds=seconds)
        table.add_row(str(number), f"{rates[number]:,.0f}")
    device = "copied to the GPU" if resources.has_device else "no GPU"
    print(f"one rank's loader alone, {resources.num_cores} cores, {device}")
    print_table(table)
    best = choose_number(rates)
    print(f"num_workers: {best} is the smallest number that is about as fast as the fastest")
    print(f"\nWrite in {path.name}:\n\ndata:\n  num_workers: {best}")


def numbers_to_try(cores_per_rank: int) -> list[int]:
    """Return the numbers of workers to measure.

    >>> numbers_to_try(1), numbers_to_try(10)
    ([0, 1, 2], [0, 1, 2, 4, 8])
    """
    return [0, *(number for number in (1, 2, 4, 8, 16, 32) if number <= max(2, cores_per_rank))]


def _tokens_per_second(loader: Iterable[Batch], *, seconds: float) -> float:
    """Return the rate of the batches after the first one, for which workers start."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    batches = (batch if device is None else batch.to(device, non_blocking=True) for batch in loader)
    next(batches)
    started = time.perf_counter()
    num_tokens = 0
    for number, batch in enumerate(batches, start=1):
        num_tokens += batch.num_tokens
        if number >= MIN_BATCHES and time.perf_counter() - started >= seconds:
            break
    if device is not None:
        torch.accelerator.synchronize()
    return num_tokens / (time.perf_counter() - started)


def choose_number(rates: Mapping[int, float]) -> int:
    """Return the smallest number of workers that is about as fast as the fastest."""
    fastest = max(rates.values())
    return min(number for number, rate in rates.items() if rate >= NEARLY_FASTEST * fastest)
