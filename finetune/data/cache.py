"""Rows are tokenised once and found again by content: one process makes the set, others wait on a lock file."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.sections.data import DataSection, SourceSection
from finetune.data.chunks import Chunk, Encode, Recipe, encode_chunks
from finetune.data.counts import refuse
from finetune.data.sources import Source
from finetune.data.store import FORMAT_VERSION, Identity, PreparedSet, write_set
from finetune.data.workers import num_prepare_workers
from finetune.errors import DataError
from finetune.runtime.files import make_once

CODE_VERSION = 1
"""Raised whenever the same rows would be encoded otherwise than before: no older set is used then."""

_ROWS_BETWEEN_WORDS = 100_000


def prepare_set(
    source: SourceSection,
    encode: Encode,
    *,
    section: DataSection,
    identity: Mapping[str, str],
    say: Callable[[str], None],
) -> PreparedSet:
    """Return the source's samples, tokenised now or found in the cache of earlier runs.

    `identity` names all that `encode` depends on (digests of tokenizer and template, the task). Call it outside any
    collective: ranks that come while one of them tokenises wait on a lock file. What is cut or left out is counted in
    the set's `counts`; what the section refuses raises DataError with the counts, after all rows have been seen.
    """
    key = source_key(source, section)
    opened = Source(source, key=key, say=say)
    made_of = _identify(opened, encode, section=section, identity=identity)
    folder = cache_folder(section) / "prepared" / made_of.fingerprint
    recipe = Recipe(opened.format, encode, section.max_length, section.over_length)

    def build(staging: Path) -> None:
        chunks = encode_chunks(opened.rows(), recipe, num_workers=num_prepare_workers(section))
        refuse(write_set(staging, _narrated(chunks, key=key, say=say), made_of), section, key=key)

    try:
        make_once(folder, build, say=say)
    except OSError as error:
        raise DataError(f"data.cache_folder: {folder.parent} cannot be written: {error}. Set another one.") from error
    prepared = PreparedSet(folder)
    if prepared.fingerprint != made_of.fingerprint:
        raise DataError(f"the prepared set {folder} was made of something else. Delete that folder; it is made anew.")
    for line in prepared.counts.lines():
        say(f"{key}: {line}")
    return prepared


def source_key(source: SourceSection, section: DataSection) -> str:
    """Return the source's place in the job YAML."""
    return "data.validation" if source is section.validation else "data.train"


def cache_folder(section: DataSection) -> Path:
    """Return where tokenised rows are kept."""
    return Path(section.cache_folder or "~/.cache/finetune").expanduser()


def _identify(source: Source, encode: Encode, *, section: DataSection, identity: Mapping[str, str]) -> Identity:
    parts: dict[str, Any] = {
        "code_version": [CODE_VERSION, FORMAT_VERSION],
        "content": source.digest(),
        "rows": [source.section.skip, source.section.take],
        "format": [source.format.name, dict(sorted(source.format.columns.items()))],
        "length": [section.max_length, section.over_length],
        "no_target": section.no_target,
        "system_prompt": section.system_prompt,
        "encode": f"{getattr(encode, '__module__', '')}.{getattr(encode, '__qualname__', '')}",
        "identity": dict(sorted(identity.items())),
    }
    return Identity(hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest(), parts)


def _narrated(chunks: Iterable[Chunk], *, key: str, say: Callable[[str], None]) -> Iterator[Chunk]:
    rows = 0
    for chunk in chunks:
        yield chunk
        before, rows = rows, rows + chunk.counts.rows
        if before // _ROWS_BETWEEN_WORDS != rows // _ROWS_BETWEEN_WORDS:
            say(f"{key}: {rows:,} rows tokenised")
