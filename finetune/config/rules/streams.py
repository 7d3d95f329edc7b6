"""Rules of `stream`: what cannot be known or done before all rows have been seen is refused."""

from collections.abc import Iterator

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import TrainedSourceSection
from finetune.errors import Problem

SPLITS = ("fraction", "hash_fraction")


def streams(config: RunConfig) -> Iterator[tuple[str, TrainedSourceSection]]:
    """Yield each source that is streamed with its dotted key."""
    train = config.data.train
    for number, source in enumerate(train.mix):
        if source.stream is not None:
            yield f"data.train.mix.{number}", source
    if train.stream is not None and not train.mix:
        yield "data.train", train


def budget_is_in_steps(config: RunConfig) -> Iterator[Problem]:
    """Nobody knows how many epochs or tokens a stream has."""
    for key, _ in streams(config):
        for name in ("epochs", "tokens"):
            if getattr(config.train, name) is not None:
                message = f"nobody knows how long the stream `{key}` is. Write `train.steps`."
                yield Problem(f"train.{name}", message)


def split_needs_all_rows(config: RunConfig) -> Iterator[Problem]:
    """What is held out of the training rows is prepared before the first step, for which a stream is too large."""
    validation = config.data.validation
    for key, _ in streams(config):
        for name in SPLITS:
            if validation is not None and getattr(validation, name) is not None:
                yield Problem(
                    f"data.validation.{name}",
                    f"to find its rows, all of the stream `{key}` would be read before the first step. Write a `path` "
                    "of rows to evaluate on; `exclude_from_train: true` leaves them out of the stream.",
                )


def step_fits_window(config: RunConfig) -> Iterator[Problem]:
    """What is sorted or learnt from at once lies in a window and those beside it."""
    steps, batch = max(1, config.data.batching.length_window_steps), config.train.global_batch_size
    for key, source in streams(config):
        assert source.stream is not None
        if source.stream.window_rows < steps * batch:
            what = f"{steps} steps of {batch}, sorted by length together," if steps > 1 else f"a step of {batch}"
            message = (
                f"{source.stream.window_rows:,} rows are fewer than {what} take. Write at least {steps * batch:,}."
            )
            yield Problem(f"{key}.stream.window_rows", message)


def slices_need_all_rows(config: RunConfig) -> Iterator[Problem]:
    """A slice counts rows, which a stream does not."""
    for key, source in streams(config):
        if source.name is not None and "[" in source.split:
            whole = source.split.partition("[")[0]
            message = f"a slice cannot be streamed. Write `{whole}`, with `skip` and `take` where rows are counted."
            yield Problem(f"{key}.split", message)


STREAM_RULES = (budget_is_in_steps, split_needs_all_rows, step_fits_window, slices_need_all_rows)
