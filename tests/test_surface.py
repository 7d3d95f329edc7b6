"""Nothing is declared that does nothing: every key is read somewhere and explained in the reference."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from finetune.config.run_config import RunConfig
from finetune.config.section import Section

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "finetune"


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that an annotation such as `LoraSection | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def keys_of(section: type[Section], *above: str) -> Iterator[tuple[str, ...]]:
    """Yield every key that holds a value, with the keys above it."""
    for name, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        number = ("N",) if get_origin(field.annotation) is tuple else ()  # a list of sections
        for each in inner:
            yield from keys_of(each, *above, name, *number)
        if not inner:
            yield (*above, name)


def attributes_read() -> set[str]:
    """Return every attribute that the package reads outside of `config/`."""
    files = [file for file in PACKAGE.rglob("*.py") if "config" not in file.relative_to(PACKAGE).parts]
    assert len(files) > 50
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


KEYS = sorted({".".join(key) for key in keys_of(RunConfig)})


def test_the_whole_schema_was_walked():
    assert len(KEYS) > 80
    assert {"run.folder", "model.lora.rank", "data.train.path", "evaluate.generate.metrics"} <= set(KEYS)


def test_every_key_is_read_by_something():
    read = attributes_read()
    by_name = ("data.audit.max_",)  # exceeded_shares in finetune/data/token_cache/counts.py
    unread = [key for key in KEYS if key.rpartition(".")[2] not in read and not key.startswith(by_name)]
    assert unread == [], "these keys are declared and never read: use them or take them out of their section"


def test_every_key_is_in_the_reference():
    reference = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference/job").glob("*.md"))
    missing = [key for key in KEYS if f"`{key}`" not in reference]
    assert missing == [], "write it anew: finetune reference --into docs/reference/job"
