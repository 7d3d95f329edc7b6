"""The JSON schema of the job YAML, descriptions of its values, and the reference that is generated from it."""

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from finetune.config.formatting import format_list
from finetune.config.run_config import RunConfig
from finetune.config.yaml import MAX_DEPTH, MAX_VALUES
from finetune.registry.layouts import shipped_layouts
from finetune.runtime.text.terminal import format_json

Node = Mapping[str, Any]
"""The JSON schema of one key."""


@cache
def run_schema() -> dict[str, Any]:
    """Return the JSON schema of the whole job YAML; plugins add names and options, after which its cache is cleared."""
    return RunConfig.model_json_schema()


def node_at(key: str) -> Node | None:
    """Return the schema of a dotted key, None if the key does not exist; the empty key is the whole file."""
    nodes: list[Node] = [run_schema()]
    for part in key.split(".") if key else ():
        nodes = [inner for node in nodes for branch in branches(node) if (inner := _inside(branch, part)) is not None]
    return nodes[0] if nodes else None


def branches(node: Node) -> list[Node]:
    """Return the alternatives that a key may hold, with references resolved."""
    if "$ref" in node:
        return branches(run_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in node or "oneOf" in node:
        return [branch for inner in node.get("anyOf", node.get("oneOf", ())) for branch in branches(inner)]
    return [node]


def keys_of(node: Node) -> dict[str, Node]:
    """Return the keys that a section has, by name; empty for a single value."""
    return {name: inner for branch in branches(node) for name, inner in branch.get("properties", {}).items()}


def items_of(node: Node) -> dict[str, Node]:
    """Return the keys of the sections in a list, by name; empty if it holds none."""
    return keys_of(_items_node(node))


def _items_node(node: Node) -> Node:
    """Return the schema of a list's items; empty if the node is not a list."""
    return next((each["items"] for each in branches(node) if "items" in each), {})


def all_keys(node: Node | None = None, *, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every dotted key with its schema, sections before their keys."""
    for name, inner in keys_of(run_schema() if node is None else node).items():
        yield prefix + name, inner
        yield from all_keys(inner, prefix=f"{prefix}{name}.")


def description_of(node: Node) -> str:
    """Return the sentence that explains the key, or else the section that it holds."""
    return str(node.get("description") or next((each.get("description", "") for each in branches(node)), ""))


CEILING = 1_000
"""Upper bounds of at least this value are only mentioned for values that exceed them."""


def describe_values(node: Node, *, in_full: bool = False) -> str:
    """Return a description of the allowed values, such as `a whole number of at least 1, or null`.

    `in_full` includes upper bounds of at least CEILING.
    """
    kinds = [each if in_full else _without_ceiling(each) for each in branches(node)]
    texts = list(dict.fromkeys(_describe_one(each) for each in kinds if each.get("type") != "null"))
    optional = any(each.get("type") == "null" for each in kinds)
    return " or ".join(texts) + (", or `null`" if optional else "")


def _inside(node: Node, part: str) -> Node | None:
    if part in node.get("properties", {}):
        inner: Node = node["properties"][part]
        return inner
    further = node.get("items") if part.isdecimal() else node.get("additionalProperties")
    if further is True:
        return {}
    return further if isinstance(further, dict) else None


def exceeds_ceiling(value: Any, node: Node) -> bool:
    """Return whether a number is invalid because its magnitude exceeds an upper bound of at least CEILING."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    bounds = [each.get(name) for each in branches(node) for name in ("maximum", "exclusiveMaximum")]
    return abs(value) >= max((bound for bound in bounds if bound is not None), default=math.inf) >= CEILING


def _without_ceiling(node: Node) -> Node:
    """Return the schema, and that of its items, without upper bounds of at least CEILING."""
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    plain = {name: each for name, each in node.items() if name not in bounds or abs(each) < CEILING}
    if "items" in plain:
        (item,) = list(branches(plain["items"]))[:1]
        plain["items"] = _without_ceiling(item)
    return plain


def _describe_one(node: Node) -> str:
    if "enum" in node or "const" in node:
        return format_list(node.get("enum", [node.get("const")]), last="or")
    match node.get("type"):
        case "object" if "properties" in node:
            return "a section"
        case "object":
            return "a mapping" + (" of texts" if node.get("additionalProperties", True) is not True else "")
        case "array":
            items: Node = next(iter(branches(node["items"]))) if "items" in node else {}
            if "properties" in items:
                return "a list of sections"
            name = {"string": "text", "number": "number", "integer": "whole number"}.get(items.get("type", ""), "value")
            low, high = node.get("minItems"), node.get("maxItems")
            plural = f"{name}s" if (high or low) != 1 else name
            count = f"{low} " if low == high else f"{low} to {high} " if high is not None else f"at least {low} "
            return f"a list of {count if low is not None else ''}{plural}{_describe_bounds(items)}"
        case "string":
            text = "one character" if node.get("maxLength") == 1 else "text"
            text += f" such as `{node['examples'][0]}`" if node.get("examples") else ""
            formats = {
                "path": "a path",
                "name or path": "a name or a path",
                "name of a plugin": "a name that a plugin adds",
            }
            return formats.get(node.get("format", ""), text)
        case "integer":
            return "a whole number" + _describe_bounds(node)
        case "number":
            return "a number" + _describe_bounds(node)
        case "boolean":
            return "`true` or `false`"
    return "any value"


def _format_bound(bound: float) -> str:
    if isinstance(bound, int):
        return f"{bound:,}"
    return f"{bound:,.0f}" if bound >= CEILING else f"{bound:g}"


def _describe_bounds(node: Node) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f" from {low:,g} to {_format_bound(high)}"
    parts = [
        f"{word} {_format_bound(node[name])}"
        for name, word in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "of at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in node
    ]
    return f" {' and '.join(parts)}" if parts else ""


INTRODUCTION = f"""# Every key of a job file

Made by `finetune reference` from the schema; do not edit.

- YAML 1.2: `2e-5` is a number, `yes` is text, a key written twice is an error, environment
  variables are not expanded (`$${{` is the text `${{`).
- Unknown keys are errors, and so are keys that have no effect in the combination in which they are written.
- `model: NAME` means `model: {{name: NAME}}`; the same holds for `model.tokenizer` and `model.image_processor`.
- A relative path is resolved against the folder of the job file, in `--set` too; `~` is the home folder.
- `--set train.learning_rate=1e-4` overrides one key of the file; the value is read as YAML, `null` unsets.
- `finetune check job.yaml` reports every problem of a file at once; with `--model` the model is built from its config
  without memory for weights, and one forward pass is made.
- A job file has at most 1 MiB, {MAX_VALUES:,} keys and values (aliases expanded) and {MAX_DEPTH} levels; every number
  has an upper bound, far above any use, which is in the schema.
- For completion and checks in an editor, begin the file with
  `# yaml-language-server: $schema=PATH/TO/docs/finetune.schema.json` (`finetune schema` prints it).
"""


def reference_markdown() -> str:
    """Return the reference page: every key with its values, default and meaning."""
    return "\n".join([INTRODUCTION, *_sections(keys_of(run_schema()))])


def reference_pages() -> dict[str, str]:
    """Return the reference as pages by file name: `index.md`, and one for each section of the job.

    A path of docs/ in it becomes a link relative to docs/reference/job/.
    """
    text = re.sub(r"(?<![`/])docs/([\w/-]+)\.md", r"[\1](../../\1.md)", reference_markdown())
    first, own, *sections = re.sub(r"^#(#+ )", r"\1", text, flags=re.MULTILINE).split("\n# ")
    pages = {re.findall(r"\w+", section)[0]: f"# {section.rstrip()}\n" for section in sections}
    listed = [f"| [`{name}`]({name}.md) | {page.splitlines()[2]} |" for name, page in pages.items()]
    contents = "\n".join(["## Sections", "", "| section | what it says |", "|---|---|", *listed])
    index = f"{first}\n{contents}\n\n## {own.rstrip()}\n"
    return {"index.md": index, **{f"{name}.md": page for name, page in pages.items()}, "layouts.md": _layouts_page()}


def _layouts_page() -> str:
    """Return the page of the layouts that `finetune preview FILE` recognizes."""
    rows = []
    for entry in shipped_layouts().layouts:
        tasks = dict.fromkeys(f"`{reading.format}` for `{reading.task}`" for reading in entry.readings)
        rows.append(f"| {entry.description} | {', '.join(tasks) or 'not training rows: a message says what to do'} |")
    return "\n".join(["# Layouts of rows", "", _ABOUT_LAYOUTS, "", "| each row is | read as |", "|---|---|", *rows, ""])


_ABOUT_LAYOUTS = """\
Rows in these layouts are recognized by the names and the values of their columns, the first one that fits.
[`finetune preview FILE`](../../how-to/data.md#files-as-they-are) prints the lines of a job that read them, and
`finetune init` writes them. A column that changes what a row means and that is not read is named.
[A plugin](../../how-to/plugins.md) adds others with `register.layout`."""


def write_reference(folder: Path) -> None:
    """Write the pages of the reference into the folder, and create it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in reference_pages().items():
        (folder / name).write_text(page, encoding="utf-8")


def json_schema() -> str:
    """Return the JSON schema of the job YAML as indented text."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "finetune job"}
    return format_json({**run_schema(), **head}, indent=2) + "\n"


def _sections(nodes: Mapping[str, Node], *, prefix: str = "") -> Iterator[str]:
    """Yield a table for each section among the keys, followed by the tables of the sections inside it."""
    values = {name: node for name, node in nodes.items() if not keys_of(node)} if not prefix else {}
    if values:
        yield "## The job file itself\n\n| key | value | default | meaning |\n|---|---|---|---|"
        for name, node in values.items():
            yield _row(name, node, is_required=False)
        yield ""
    for name, node in nodes.items():
        section, keys, title = node, keys_of(node), prefix + name
        if not keys:
            section, keys, title = _items_node(node), items_of(node), f"{title}.N"
        if not keys:
            continue
        required = {name for branch in branches(section) for name in branch.get("required", ())}
        yield f"{'#' * (title.removesuffix('.N').count('.') + 2)} `{title}`\n\n{description_of(node)}\n"
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
        shown_default = f"`{format_json(default)}`"
    cells = (f"`{key}`", describe_values(node).removesuffix(", or `null`"), shown_default, description_of(node))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
