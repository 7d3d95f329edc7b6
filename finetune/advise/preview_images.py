"""The preview of images: which files, how large, of which class, and what size the model sees them in."""

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.data.encoding.labelled_images import IMAGE, LABEL, name_of
from finetune.data.features import Features
from finetune.data.images.decode import image_facts
from finetune.data.order.pool import Pool
from finetune.runtime.amounts import size_text
from finetune.task.protocol import Task


@dataclass(frozen=True)
class Cut:
    """How a step is cut."""

    global_batch_size: int
    microbatch_size: int


def image_lines(pool: Pool, task: Task, *, cut: Cut, start: int, num_samples: int) -> Iterator[str]:
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
    label = task.facts["labels"][int(features.arrays[LABEL][0])]
    size = f"{facts.width} x {facts.height} {facts.kind}, {size_text(len(content))}"
    return f"{name_of(features)}  {size}  class `{label}`  ({place})"


def _batch_line(position: int, cut: Cut) -> str:
    step, offset = divmod(position, cut.global_batch_size)
    number, of = offset // cut.microbatch_size + 1, cut.global_batch_size // cut.microbatch_size
    return f"\n━━ step {step + 1}, microbatch {number} of {of}"
