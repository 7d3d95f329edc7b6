"""Rules of where rows come from: one place each, at an address that is known."""

from collections.abc import Iterator

from finetune.config.paths import is_path, is_url
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection, ValidationSourceSection
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem

SHARES = ("fraction", "hash_fraction")
"""Ways to evaluate on a part of the training rows."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "az", "hf", "https", "http", "file", "memory")
"""Kinds of storage that rows are read from."""


def places(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Yield each place in which rows can be written, with its dotted key."""
    train, validation = config.data.train, config.data.validation
    yield from ((f"data.train.mix.{number}", source) for number, source in enumerate(train.mix))
    if not train.mix:
        yield "data.train", train
    if validation is not None:
        yield "data.validation", validation


def sources(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Yield each source that has rows of its own, with its dotted key."""
    for key, source in places(config):
        if not is_share(source):
            yield key, source


def is_share(source: SourceSection) -> bool:
    """Tell whether the source is a share of the training rows."""
    return isinstance(source, ValidationSourceSection) and any(getattr(source, name) is not None for name in SHARES)


def source_is_one(config: RunConfig) -> Iterator[Problem]:
    """Rows come from exactly one place."""
    more = {
        "data.train": ", or `mix` (several of these)",
        "data.validation": ", or a share of the training rows (`fraction` or `hash_fraction`)",
    }
    for key, source in places(config):
        names = ("path", "name", *(SHARES if isinstance(source, ValidationSourceSection) else ()))
        written = [name for name in names if getattr(source, name) is not None]
        if not written:
            message = f"there are no rows. Write `path` (files) or `name` (a hub dataset){more.get(key, '')}."
            yield Problem(key, message)
        for name in written[1:]:
            yield Problem(f"{key}.{name}", f"the rows are in `{key}.{written[0]}` already. Write only one of them.")


def name_is_of_the_hub(config: RunConfig) -> Iterator[Problem]:
    """A dataset of the hub has no path."""
    for key, source in sources(config):
        if source.name is not None and is_path(source.name):
            yield Problem(f"{key}.name", f"`{source.name}` is a path, not a dataset of the hub. Write it as `path`.")


def address_is_known(config: RunConfig) -> Iterator[Problem]:
    """Rows at a URL are in a kind of storage that is known, and no secret is written with it."""
    for key, source in sources(config):
        if source.path is None or not is_url(source.path):
            continue
        scheme, _, rest = source.path.partition("://")
        if scheme not in SCHEMES:
            hint = did_you_mean(scheme, SCHEMES) or f"There are {listed(SCHEMES[:-1])}."
            yield Problem(f"{key}.path", f"there is no storage `{scheme}://`. {hint}")
        elif "@" in rest.partition("/")[0]:
            yield Problem(
                f"{key}.path", "secrets do not belong in a job file. Set the storage's environment variables."
            )


SOURCE_RULES = (source_is_one, name_is_of_the_hub, address_is_known)
