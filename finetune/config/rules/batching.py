"""Rules of `data.batching` and of a mix: what stands at a position, and how much of it each source has."""

from collections.abc import Iterator

from finetune.config.run_config import RunConfig
from finetune.config.wording import listed
from finetune.errors import Problem

LARGEST_WINDOW = 100_000_000
"""Samples whose lengths are sorted at once."""

AMOUNTS = ("weight", "rows", "epochs")
"""How much of the mix a source is."""


def every_sample_fits(config: RunConfig) -> Iterator[Problem]:
    """No sample is longer than a pack or a batch."""
    tokens, longest = config.data.batching.tokens, config.data.max_length
    if tokens is not None and longest is not None and tokens < longest:
        yield Problem(
            "data.batching.tokens",
            f"a sample of `data.max_length` ({longest}) tokens does not fit into {tokens}. Write at least {longest}.",
        )


def batch_by_tokens_is_a_microbatch(config: RunConfig) -> Iterator[Problem]:
    """Two batches by tokens in one forward pass would be padded to the longer of the two."""
    if config.data.batching.by != "tokens":
        return
    evaluated = config.evaluate.microbatch_size if config.evaluate else None
    for section, size in (("train", config.train.microbatch_size), ("evaluate", evaluated)):
        if size is not None and size > 1:
            message = "with `data.batching.by: tokens` one position is a whole batch. Write 1."
            yield Problem(f"{section}.microbatch_size", message)


def mix_is_the_source(config: RunConfig) -> Iterator[Problem]:
    """A mix stands in place of a source."""
    for name in ("path", "name"):
        if config.data.train.mix and getattr(config.data.train, name) is not None:
            yield Problem(f"data.train.{name}", "the rows are in `data.train.mix` already. Write only one of them.")


def mix_has_one_measure(config: RunConfig) -> Iterator[Problem]:
    """All sources of a mix say how much of it they are, in the same way."""
    first = None
    for number, source in enumerate(config.data.train.mix):
        key = f"data.train.mix.{number}"
        written = [name for name in AMOUNTS if getattr(source, name) is not None]
        first = first or (written[0] if written else None)
        if not written:
            yield Problem(key, f"how much of the mix is it? Write one of {listed(AMOUNTS, last='or')}.")
        for name in written:
            if name != first:
                message = f"`data.train.mix` is measured by `{first}` already. Write that in every source."
                yield Problem(f"{key}.{name}", message)


def rows_are_positions(config: RunConfig) -> Iterator[Problem]:
    """Where several rows stand at a position, rows cannot be counted out."""
    by = config.data.batching.by
    for number, source in enumerate(config.data.train.mix):
        if source.rows is not None and by != "samples":
            message = f"with `data.batching.by: {by}` several rows are drawn at once. Write `epochs` or `weight`."
            yield Problem(f"data.train.mix.{number}.rows", message)


def window_can_be_sorted(config: RunConfig) -> Iterator[Problem]:
    """The lengths of a whole window are sorted at once, in memory."""
    steps, batch = config.data.batching.length_window_steps, config.train.global_batch_size
    if steps > 1 and steps * batch > LARGEST_WINDOW:
        most = max(1, LARGEST_WINDOW // batch)
        message = f"{steps:,} steps of {batch:,} samples are too many to be sorted at once. Write at most {most:,}."
        yield Problem("data.batching.length_window_steps", message)


BATCHING_RULES = (
    window_can_be_sorted,
    every_sample_fits,
    batch_by_tokens_is_a_microbatch,
    mix_is_the_source,
    mix_has_one_measure,
    rows_are_positions,
)
