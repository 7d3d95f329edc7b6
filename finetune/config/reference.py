"""The page of all keys and the schema for editors, made from the sections themselves."""

from collections.abc import Iterator, Mapping

from finetune.config.limits import MAX_DEPTH, MAX_VALUES
from finetune.config.schema import Node, branches, describe, items_of, keys_of, meaning, run_schema
from finetune.runtime.terminal import json_text

INTRODUCTION = f"""# Every key of a job file

Made by `finetune reference` from the schema; do not edit.

- YAML 1.2: `2e-5` is a number, `yes` is text, a key written twice is an error, environment variables are not expanded.
- Unknown keys are errors, and so are keys that do nothing in the combination in which they are written.
- A relative path is resolved against the folder of the job file, in `--set` too; `~` is the home folder.
- `--set train.learning_rate=1e-4` writes one key over the file; the value is read as YAML, `null` unsets.
- `finetune check job.yaml` names every problem of a file at once; with `--model` the model is built from its config,
  without memory for weights, and asked once.
- A job file has at most 1 MiB, {MAX_VALUES:,} keys and values (aliases expanded) and {MAX_DEPTH} levels; every number
  has an upper bound, far above any use, which the schema names.
- For completion and checks in an editor, begin the file with
  `# yaml-language-server: $schema=PATH/TO/docs/finetune.schema.json` (`finetune schema` prints it).
"""


def reference_markdown() -> str:
    """Return the reference page: every key with what it may hold, its default and what it means."""
    return "\n".join([INTRODUCTION, *_sections(keys_of(run_schema()))])


def json_schema() -> str:
    """Return the JSON schema of the job YAML as indented text."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "finetune job"}
    return json_text({**run_schema(), **head}, indent=2) + "\n"


def _sections(nodes: Mapping[str, Node], *, prefix: str = "") -> Iterator[str]:
    """Yield a table for each section among the keys, then those of the sections in it."""
    for name, node in nodes.items():
        keys, title = keys_of(node), prefix + name
        if not keys:
            keys, title = items_of(node), f"{title}.N"
        if not keys:
            continue
        required = {name for branch in branches(node) for name in branch.get("required", ())}
        yield f"{'#' * (title.removesuffix('.N').count('.') + 2)} `{title}`\n\n{meaning(node)}\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        for inner_name, inner in keys.items():
            yield _row(f"{title}.{inner_name}", inner, is_required=inner_name in required)
        yield ""
        yield from _sections(keys, prefix=f"{title}.")


def _row(key: str, node: Node, *, is_required: bool) -> str:
    default = node.get("default")
    if is_required:
        shown_default = "**required**"
    elif keys_of(node):
        shown_default = "none" if default is None else "its own defaults"
    else:
        shown_default = f"`{json_text(default)}`"
    cells = (f"`{key}`", describe(node).removesuffix(", or `null`"), shown_default, meaning(node))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
