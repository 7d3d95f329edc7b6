"""Small configs of other trainers, written for these tests, and what is made of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.migration.migrate import Migration, migrate_file


@pytest.fixture
def migrate(tmp_path: Path) -> Callable[..., Migration]:
    """Return a function from the text of a config to what is made of it."""

    def migrate_text(text: str, *, name: str = "theirs.yaml", **options: Any) -> Migration:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return migrate_file(path, **options)

    return migrate_text


def job_of(migration: Migration) -> Mapping[str, Any]:
    """Return the job as plain values; its check has no problems."""
    assert not migration.problems, [str(problem) for problem in migration.problems]
    values: Mapping[str, Any] = YAML(typ="safe").load(migration.job)
    return values


def fate_of(migration: Migration, key: str) -> tuple[str, str]:
    """Return what became of a key, and the text that it is named with."""
    outcome = migration.draft.outcomes[key]
    return outcome.fate, outcome.text
