"""`finetune preview`: the samples as the model sees them, without a model or a process group.

Of images: files, sizes, classes, and the size in which the model sees them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.commands.audit_tables import print_audit
from finetune.commands.preview.batches import BatchPreview
from finetune.commands.preview.page import preview_page
from finetune.commands.preview.terminal import print_batches
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import AuditSection
from finetune.data.encoding.labelled_images import IMAGE, LABEL, image_name
from finetune.data.features import Features
from finetune.data.images.decode import image_facts
from finetune.data.order.dataset_view import DatasetView
from finetune.errors import UserError
from finetune.registry.tasks import TASKS
from finetune.report.run_log import RunLog
from finetune.run.setup.data import make_training_data
from finetune.run.setup.data_audit import audit_training_data
from finetune.runtime.files import atomic
from finetune.runtime.resources import format_size
from finetune.runtime.text.library_output import quiet_libraries
from finetune.runtime.text.terminal import printable
from finetune.task.protocol import Task


@dataclass(frozen=True)
class BatchSizes:
    """How a step is cut."""

    global_batch_size: int
    microbatch_size: int


def image_lines(pool: DatasetView, task: Task, *, cut: BatchSizes, start: int, num_samples: int) -> Iterator[str]:
    """Yield a line for each image from position `start` on, below one for each microbatch, and one on the tensors."""
    ids = pool.order.samples(start, start + num_samples).tolist()
    for position, sample_id in enumerate(ids, start=start):
        if position == start or position % cut.microbatch_size == 0:
            yield _batch_line(position, cut)
        yield f"position {position}  {image_line(pool.samples[sample_id], task, place=pool.samples.place(sample_id))}"
    pixels = task.collate([pool.samples[ids[0]]]).inputs["pixel_values"]
    channels, height, width = pixels.shape[1:]
    yield ""
    yield (
        f"the model sees {channels} x {height} x {width} (channels, height, width), values of the first from "
        f"{pixels.min().item():.2f} to {pixels.max().item():.2f}"
    )


def image_line(features: Features, task: Task, *, place: str) -> str:
    """Return file, place, size and class of an image."""
    content = features.arrays[IMAGE].tobytes()
    facts = image_facts(content)
    label = task.data_facts.values["labels"][int(features.arrays[LABEL][0])]
    size = f"{facts.width} x {facts.height} {facts.kind}, {format_size(len(content))}"
    return f"{image_name(features)}  {size}  class `{label}`  ({place})"


def _batch_line(position: int, cut: BatchSizes) -> str:
    step, offset = divmod(position, cut.global_batch_size)
    number, of = offset // cut.microbatch_size + 1, cut.global_batch_size // cut.microbatch_size
    return f"\n━━ step {step + 1}, microbatch {number} of {of}"


POSITION_UNITS = {"samples": "sample", "packs": "pack", "tokens": "batch"}
"""What stands at a position, by `data.batching.by`."""


def preview(path: Path, overrides: Sequence[str], *, num_rows: int, html: Path | None, start: int) -> None:
    """Print the samples that the job trains on from a position on, and the audit; with `html`, as a page too.

    Tokenises first, as training would, and stops at nothing that `data.audit` forbids: here it is to be seen. Raises
    ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config = loaded.config
    if html is not None and html.is_dir():
        raise UserError(f"--html: {html} is a folder. Name a file: {html / 'preview.html'}.")
    if not TASKS[config.task.name].has_tokens:
        _preview_images(config, start=start, num_samples=num_rows, html=html)
        return
    log = RunLog(is_main=True)
    training_data = make_training_data(without_audit_limits(config), log, locations=loaded.sources)
    unit = POSITION_UNITS[config.data.batching.by]
    walk = BatchPreview(
        training_data.training,
        training_data.task,
        training_data.tokenizer,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.known_microbatch_size,
    )
    batches = list(walk.batches(start=start, num_samples=num_rows))
    audit = audit_training_data(config, training_data)
    print_batches(batches, unit=unit)
    print()
    print_audit(audit)
    if html is not None:
        page = preview_page(batches, audit, title=f"Preview of {path.name}", facts=_facts(config), unit=unit)
        _write(html, page)


def _preview_images(config: RunConfig, *, start: int, num_samples: int, html: Path | None) -> None:
    if html is not None:
        raise UserError("--html: there is no page of images. Leave it out: the preview names the files to look at.")
    training_data = make_training_data(without_audit_limits(config), RunLog(is_main=True))
    audit = audit_training_data(config, training_data)
    cut = BatchSizes(config.train.global_batch_size, config.train.known_microbatch_size)
    for line in image_lines(training_data.training, training_data.task, cut=cut, start=start, num_samples=num_samples):
        print(line)
    print()
    print_audit(audit)


def _write(html: Path, page: str) -> None:
    try:
        atomic.write_text(html, printable(page))
    except OSError as error:
        raise UserError(f"--html: {html} cannot be written: {error.strerror}. Name another file.") from error
    print(f"wrote {html}")


def without_audit_limits(config: RunConfig) -> RunConfig:
    """Return the config with nothing forbidden by `data.audit`: a preview shows everything."""
    data = config.data.model_copy(update={"audit": AuditSection()})
    return config.model_copy(update={"data": data})


def _facts(config: RunConfig) -> list[str]:
    """Return what the page is of, in a few words."""
    data, train = config.data, config.train
    return [
        f"task {config.task.name}",
        *([f"max_length {data.max_length:,}, longer rows: {data.over_length}"] if data.max_length else []),
        f"batching by {data.batching.by}",
        f"{train.global_batch_size:,} per step, {train.known_microbatch_size:,} per microbatch",
        f"seed {config.run.seed}" if data.shuffle else "not shuffled",
    ]
