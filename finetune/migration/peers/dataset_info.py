"""LLaMA-Factory's dataset_info.json: where the rows of a dataset are, and what their columns mean.

The rules come from its data/parser.py, data/converter.py and data/loader.py.
"""

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.formatting import did_you_mean
from finetune.config.paths import absolute_path, is_url
from finetune.errors import UserError
from finetune.migration.complete import put_source, renamed, source_of
from finetune.migration.draft import Draft
from finetune.migration.source import Leaf, PeerFile, is_present, read_peer_file
from finetune.registry.formats import FORMATS

FILE = "dataset_info.json"

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""The columns of rows where a dataset has no `columns`."""

_TAGS: Mapping[str, tuple[str, ...]] = {
    **{"role_tag": ("from", "role"), "content_tag": ("value", "content")},
    **{"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)},
    **{"observation_tag": ("observation", "tool"), "function_tag": ("function_call",)},
}
"""The words in turns that are read here; the first is the default of LLaMA-Factory."""

_ADDRESSES = ("name", "path")
"""The facts of where rows are; LLaMA-Factory takes the first."""


@dataclass(frozen=True)
class _DatasetLeaf(Leaf):
    """A key of a dataset in dataset_info.json."""

    pattern: str = ""
    position: int = 0


def read_info(draft: Draft, names: Sequence[str]) -> PeerFile | None:
    """Return dataset_info.json, None without it, and add the keys of these datasets to the draft's.

    Raises UserError for a dataset that is not in the file, and ConfigError for a file that cannot be read.
    """
    places = [folder / draft.get("dataset_dir", "data") / FILE for folder in (Path(), draft.file.path.parent)]
    info = next((read_peer_file(place) for place in places if is_present(place)), None)
    if info is None:
        return None
    leaves: dict[str, Leaf] = {}
    for position, name in enumerate(names):
        values = info.values.get(name)
        if not isinstance(values, Mapping) or not values:
            near = did_you_mean(name, info.values.keys() - {name})
            raise UserError(f"{info.path}: there is no dataset `{name}`. {near}".rstrip())
        for leaf in info.leaves.values():
            key = leaf.key.removeprefix(f"{name}.")
            if key != leaf.key and any(f"{key}.".startswith(f"{own}.") for own in values):
                named = f"{FILE}:{leaf.key}"
                leaves[named] = _DatasetLeaf(named, leaf.line, leaf.value, f"{FILE}[].{key}", position)
    others = draft.file.leaves
    draft.file = replace(draft.file, leaves=leaves)
    draft.apply()
    draft.file = replace(draft.file, leaves={**others, **leaves})
    return info


@dataclass(frozen=True)
class Dataset:
    """A dataset of dataset_info.json, by its position among those in use."""

    draft: Draft
    folder: Path  # of the file
    values: Mapping[str, Any]
    position: int
    used: dict[str, None] = field(default_factory=dict)  # the facts that are in the job

    def put(self, key: str, *facts: str, comment: str = "") -> None:
        """Write the source at our key, from these facts and its own; each gets an outcome."""
        draft = self.draft
        file = next((value for name in _ADDRESSES if (value := self._get(name))), "")
        if not file:
            raise UserError(f"{self.folder / FILE}: a dataset without `file_name` or `hf_hub_url` has no rows.")
        if "path" in self.used:
            values: dict[str, Any] = {"path": file if is_url(file) else absolute_path(file, self.folder)}
        else:
            values = source_of(file, self.folder)
        if "name" in values:
            values |= {"config": self._get("config"), "split": self._get("split")}
        elif draft.get(f"split.{self.position}", "train") != "train":
            self._refuse("a file has no splits: write `skip` and `take`.", "split")
        values |= self._reading()
        takes = [take for take in (draft.get("take"), self._get("take")) if take]
        own = [name for used in self.used if not draft.is_named(name := f"{used}.{self.position}")]
        put_source(draft, key, values | {"take": min(takes, default=None)}, *facts, "take", *own, comment=comment)
        if {"columns.images", "path"} <= self.used.keys() and not draft.get("media_dir"):
            draft.put(f"{key}.image_root", str(self.folder), comment="images are looked for there")
        others = [name for name in draft.facts if name.endswith(f".{self.position}")]
        draft.drop("LLaMA-Factory does not read it for these rows, either", *others)

    def _get(self, name: str) -> Any:
        """Return the value of a fact, which is then in use."""
        if value := self.draft.get(f"{name}.{self.position}"):
            self.used[name] = None
        return value

    def _column(self, name: str) -> str:
        return self._get(f"columns.{name}") or ("" if "columns" in self.values else _COLUMNS.get(name, ""))

    def _refuse(self, instead: str, *names: str) -> None:
        self.draft.refuse(instead, *(f"{name}.{self.position}" for name in names))

    def _reading(self) -> dict[str, Any]:
        """Return the format of the rows, and a column or a template for each of its columns."""
        task, stage = self.draft.value("task.name"), str(self.draft.get("stage", "sft")).lower()
        form = {"pretrain": "text", "sft": "sft", "vision_language_sft": "sft"}.get(task, "preference")
        form = "judged" if stage == "kto" else form
        if bool(self._get("ranking")) != (form == "preference"):
            kind = "with" if form == "preference" else "without"
            self._refuse(
                f"stage {stage} needs rows {kind} `ranking`: LLaMA-Factory refuses it, too.", "ranking", *_ADDRESSES
            )
        form, cells = self._alpaca(form) if self._get("formatting") in (None, "alpaca") else self._chat(form)
        if form == "judged":
            cells["label"] = self._column("kto_tag")
        if missing := [name for name, cell in cells.items() if not cell]:
            self._refuse(
                f"it names no column for `{missing[0]}`: LLaMA-Factory leaves the rows out.", "ranking", *_ADDRESSES
            )
        for name in ("system", "tools", "images") if form != "text" else ():
            if name in FORMATS[form].optional:
                cells[name] = self._column(name)
            else:
                self._refuse(f"format `{form}` has no `{name}`: leave out the rows with it.", f"columns.{name}")
        template = {name: cell for name, cell in cells.items() if "{{" in cell}
        columns = {name: cell for name, cell in cells.items() if name not in template}
        return {"format": form, "columns": renamed(columns), "template": template}

    def _alpaca(self, form: str) -> tuple[str, dict[str, str]]:
        """Return the format and its columns; a line end joins prompt and query."""
        asked = [name for key in ("prompt", "query") if (name := self._column(key))]
        question = asked[0] if asked else ""
        if len(asked) == 2:
            parts = f"{_variable(question)}, {_variable(asked[1])} | default('')"
            question = f"{{{{ [{parts}] | select | join('\\n') }}}}"
        self._refuse("write a `template` of `messages` with the turns before.", "columns.history")
        if form == "text":
            return form, {"text": question}
        if form == "preference":
            return form, {"prompt": question, "chosen": self._column("chosen"), "rejected": self._column("rejected")}
        cells = {"prompt": question, "completion": self._column("response")}
        return "prompt_completion" if form == "sft" else form, cells

    def _chat(self, form: str) -> tuple[str, dict[str, str]]:
        """Return the format and its columns; other words in turns than the usual ones are refused."""
        turns = self._column("messages")
        if form == "text":
            self._refuse("stage pt of LLaMA-Factory reads the first turn: write a template of `text`.", "formatting")
            return form, {"text": turns}
        tags = {tag: self._get(f"tags.{tag}") if "tags" in self.values else usual[0] for tag, usual in _TAGS.items()}
        self.draft.note("conversations whose turns do not alternate are left out in LLaMA-Factory, and read here.")
        for tag, word in tags.items():
            if word not in (None, "", *_TAGS[tag]):
                self._refuse("write a `template` of `messages` with the usual words.", f"tags.{tag}")
        if form == "judged":
            rows = _variable(turns)
            return form, {"prompt": f"{{{{ {rows}[:-1] | tojson }}}}", "completion": f"{{{{ {rows}[-1:] | tojson }}}}"}
        if form == "preference":  # each answer is one turn
            return form, {"prompt": turns, **{name: self._column(name) for name in ("chosen", "rejected")}}
        is_openai = self._get("formatting") == "openai"  # calls are in `tool_calls`
        has_text_calls = not is_openai and (tags["observation_tag"] or tags["function_tag"])
        form = "messages" if tags["role_tag"] == "role" and not has_text_calls else "conversations"
        return form, {form: turns}


def _variable(column: str) -> str:
    is_name = column.isidentifier() and not keyword.iskeyword(column) and column not in ("true", "false", "none", "row")
    return column if is_name else f"row[{column!r}]"
