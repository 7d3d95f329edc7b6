"""`finetune preview`: the rows as the model sees them, without a model and without a process group."""

from collections.abc import Sequence
from pathlib import Path

from finetune.advise.audit_tables import print_audit
from finetune.advise.preview_images import Cut, image_lines
from finetune.advise.preview_page import preview_page
from finetune.advise.preview_rows import Walk
from finetune.advise.preview_terminal import print_batches
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import AuditSection
from finetune.errors import UserError
from finetune.report.announcer import Announcer
from finetune.run.audit import audit_lessons
from finetune.run.lessons import make_lessons
from finetune.runtime import files
from finetune.runtime.log import quieten
from finetune.runtime.terminal import readable
from finetune.task.registry import reads

UNITS = {"samples": "sample", "packs": "pack", "tokens": "batch"}
"""What stands at a position, by `data.batching.by`."""


def preview(path: Path, overrides: Sequence[str], *, num_rows: int, html: Path | None, start: int) -> None:
    """Print the samples that the job trains on from a position on, and the audit; with `html`, as a page too.

    Tokenises first, as training would, and stops at nothing that `data.audit` forbids: here it is to be seen. Raises
    ConfigError and DataError as training does.
    """
    quieten(is_main=True)
    config = load_config(path, overrides).config
    if html is not None and html.is_dir():
        raise UserError(f"--html: {html} is a folder. Name a file: {html / 'preview.html'}.")
    if reads(config.task.name) == "images":
        _preview_images(config, start=start, num_samples=num_rows, html=html)
        return
    lessons = make_lessons(without_limits(config), Announcer(is_main=True))
    unit = UNITS[config.data.batching.by]
    walk = Walk(
        lessons.training,
        lessons.task,
        lessons.tokenizer,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.microbatch_size,
    )
    batches = list(walk.batches(start=start, num_samples=num_rows))
    audit = audit_lessons(config, lessons)
    print_batches(batches, unit=unit)
    print()
    print_audit(audit)
    if html is not None:
        page = preview_page(batches, audit, title=f"Preview of {path.name}", facts=_facts(config), unit=unit)
        _write(html, page)


def _preview_images(config: RunConfig, *, start: int, num_samples: int, html: Path | None) -> None:
    if html is not None:
        raise UserError("--html: there is no page of images. Leave it out: the preview names the files to look at.")
    lessons = make_lessons(without_limits(config), Announcer(is_main=True))
    audit = audit_lessons(config, lessons)
    cut = Cut(config.train.global_batch_size, config.train.microbatch_size)
    for line in image_lines(lessons.training, lessons.task, cut=cut, start=start, num_samples=num_samples):
        print(line)
    print()
    print_audit(audit)


def _write(html: Path, page: str) -> None:
    try:
        files.write_text(html, readable(page))
    except OSError as error:
        raise UserError(f"--html: {html} cannot be written: {error.strerror}. Name another file.") from error
    print(f"wrote {html}")


def without_limits(config: RunConfig) -> RunConfig:
    """Return the config with nothing forbidden by `data.audit`: whoever looks wants to see what there is."""
    data = config.data.model_copy(update={"audit": AuditSection()})
    return config.model_copy(update={"data": data})


def _facts(config: RunConfig) -> list[str]:
    """Return what the page is of, in a few words."""
    data, train = config.data, config.train
    return [
        f"task {config.task.name}",
        *([f"max_length {data.max_length:,}, longer rows: {data.over_length}"] if data.max_length else []),
        f"batching by {data.batching.by}",
        f"{train.global_batch_size:,} per step, {train.microbatch_size:,} per microbatch",
        f"seed {config.run.seed}" if data.shuffle else "not shuffled",
    ]
