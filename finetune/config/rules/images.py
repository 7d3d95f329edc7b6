"""Rules of what is about images: how they are cut and mixed, and what their models normalise by."""

from collections.abc import Iterator

from finetune.config.rules.model import adapter_of
from finetune.config.rules.sources import places
from finetune.config.rules.written import is_written
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import TrainedSourceSection
from finetune.errors import Problem


def crop_is_one(config: RunConfig) -> Iterator[Problem]:
    """An image is cut in one way, and a range goes upwards."""
    images = config.data.images
    if images.crop_scale and images.crop_padding:
        message = "the image is cut by `data.images.crop_scale` already. Write only one of them."
        yield Problem("data.images.crop_padding", message)
    if images.crop_scale and images.crop_scale[0] > images.crop_scale[1]:
        low, high = sorted(images.crop_scale)
        yield Problem("data.images.crop_scale", f"it goes from large to small. Write `[{low}, {high}]`.")


def size_is_one(config: RunConfig) -> Iterator[Problem]:
    """The size of images stands in one place."""
    if config.data.images.size is not None and is_written(config, "model.image_processor.size"):
        message = "the size is in `model.image_processor.size` already. Write only one of them."
        yield Problem("data.images.size", message)


def partners_are_at_hand(config: RunConfig) -> Iterator[Problem]:
    """Images are mixed with any other one, which a stream does not have at hand."""
    images = config.data.images
    for key, source in places(config):
        if isinstance(source, TrainedSourceSection) and source.stream is not None:
            for name in ("mixup", "cutmix"):
                if getattr(images, name) > 0:
                    message = f"an image is mixed with any other one, and `{key}` is a stream. Remove one of them."
                    yield Problem(f"data.images.{name}", message)


def norms_see_whole_groups(config: RunConfig) -> Iterator[Problem]:
    """Each microbatch holds whole groups of what batch norms normalise over; adapters leave norms as they are."""
    size = config.model.batch_norm
    if not isinstance(size, int):
        return
    if adapter_of(config) is not None:
        message = "adapters leave the base as it is, its running statistics too. Write `frozen`."
        yield Problem("model.batch_norm", message)
    elif config.train.microbatch_size % size:
        micro = config.train.microbatch_size
        message = f"a microbatch of {micro} holds no whole groups of {size}. Write a number that divides {micro}."
        yield Problem("model.batch_norm", message)


IMAGE_RULES = (crop_is_one, size_is_one, partners_are_at_hand, norms_see_whole_groups)
