"""The rows of a job, encoded: all its sources as one dataset view in the order of training, and its validation set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from finetune.config.sections.data import DataSection
from finetune.data.audit import Streamed, refuse_exceeded
from finetune.data.order.mixing import mixed_view
from finetune.data.order.order import DatasetView
from finetune.data.sources.source import OpenedSources, stream_of
from finetune.data.streams.stream import stream_view
from finetune.data.token_cache.cache import OnSourceProgress, prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.data.token_cache.store import TokenCache, dataset_view, grouped_by_length
from finetune.runtime.seeds import derive_seed


@dataclass(frozen=True)
class TrainingRows:
    """Encoded rows, the same on every rank."""

    training: DatasetView
    sources: Mapping[str, TokenCache | Streamed]  # of the training rows, by key in the job YAML: for the audit
    validation_set: TokenCache | None


def prepare_rows(
    sources: OpenedSources,
    encoding: Encoding,
    layout: DataSection,
    *,
    seed: int,
    global_batch_size: int,
    log: Callable[[str], None],
    on_progress: OnSourceProgress | None = None,
    builds: bool = True,
) -> TrainingRows:
    """Return the rows; one process encodes, the others wait on a file. NotPrepared without `builds`.

    `layout` is the `data:` section with everything resolved that says how samples share rows. Raises DataError where
    the audit exceeds its limits.
    """
    prepare = partial(prepare_set, encoding=encoding, log=log, on_progress=on_progress, builds=builds)
    audited: dict[str, TokenCache | Streamed] = {}
    views = []
    for source in sources.train:
        own_seed = derive_seed(seed, source.key) if layout.train.mix else seed
        if stream_of(source.section) is not None:
            view, audited[source.key] = stream_view(source, encoding, seed=own_seed, log=log)
        else:
            audited[source.key] = prepared = prepare(source)
            view = dataset_view(prepared, layout, seed=own_seed, key=source.key)
        views.append(view)
    refuse_exceeded(audited, layout.audit)
    mixed = mixed_view(views, layout.train, seed=seed, unit=layout.batching.unit) if layout.train.mix else views[0]
    training = grouped_by_length(mixed, layout.batching, seed=seed, global_batch_size=global_batch_size)
    return TrainingRows(training, audited, prepare(sources.validation) if sources.validation else None)
