"""LLaMA-Factory's dataset_info.json: where the rows of a dataset are, and what their columns mean.

The rules come from its data/parser.py, data/converter.py and data/loader.py.
"""

import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.formatting import did_you_mean
from finetune.config.paths import absolute_path, is_url
from finetune.errors import UserError
from finetune.migration.complete import put_source, renamed, source_of
from finetune.migration.draft import Draft, renamed_turns
from finetune.migration.source import Leaf, is_present, read_peer_file
from finetune.registry.formats import FORMATS

FILE = "dataset_info.json"

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""The columns of rows where a dataset has no `columns`."""

_TAGS: Mapping[str, tuple[str, ...]] = {
    **{"role_tag": ("from", "role"), "content_tag": ("value", "content")},
    **{"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)},
    **{"observation_tag": ("observation", "tool"), "function_tag": ("function_call",)},
}
"""The words in turns that are read here: first the default of LLaMA-Factory, last what templates write."""

_ADDRESSES = ("name", "ms", "om", "script", "path")
"""The facts of where rows are; LLaMA-Factory takes the first."""


@dataclass(frozen=True)
class _DatasetLeaf(Leaf):
    """A key of a dataset in dataset_info.json."""

    pattern: str = ""
    position: int = 0


def read_datasets(draft: Draft, names: Iterable[str]) -> dict[str, "Dataset"]:
    """Return these datasets of dataset_info.json, none without that file, and add their keys to the draft's.

    Raises UserError for a dataset that is not in the file, and ConfigError for a file that cannot be read.
    """
    places = [folder / draft.get("dataset_dir", "data") / FILE for folder in (Path(), draft.file.path.parent)]
    info = next((read_peer_file(place) for place in places if is_present(place)), None)
    if info is None:
        return {}
    leaves: dict[str, Leaf] = {}
    datasets = {}
    for position, name in enumerate(names):
        values = info.values.get(name)
        if not isinstance(values, Mapping) or not values:
            near = did_you_mean(name, info.values.keys() - {name})
            raise UserError(f"{info.path}: there is no dataset `{name}`. {near}".rstrip())
        datasets[name] = Dataset(draft, info.path.parent.absolute(), values, position)
        for leaf in info.leaves.values():
            key = leaf.key.removeprefix(f"{name}.")
            if key != leaf.key and any(f"{key}.".startswith(f"{own}.") for own in values):
                named = f"{FILE}:{leaf.key}"
                leaves[named] = _DatasetLeaf(named, leaf.line, leaf.value, f"{FILE}[].{key}", position)
    draft.file = replace(draft.file, leaves={**draft.file.leaves, **leaves})
    draft.apply(leaves.values())
    return datasets


@dataclass(frozen=True)
class Dataset:
    """A dataset of dataset_info.json, by its position among those in use."""

    draft: Draft
    folder: Path  # of the file
    values: Mapping[str, Any]
    position: int
    used: dict[str, None] = field(default_factory=dict)  # the facts that are in the job

    def put(self, key: str, *facts: str, comment: str) -> None:
        """Write the source at our key, from these facts and its own; each gets an outcome."""
        draft = self.draft
        file = next((value for name in _ADDRESSES if (value := self._get(name))), "")
        if not file:
            raise UserError(f"{self.folder / FILE}: a dataset without `file_name` or `hf_hub_url` has no rows.")
        if "path" in self.used:
            values: dict[str, Any] = {"path": file if is_url(file) else absolute_path(file, self.folder)}
        else:
            values = source_of(file, self.folder) | {"config": self._get("config")}
            if "name" not in self.used:
                self._refuse("it is not read here: download the rows, and write their `path`.", *_ADDRESSES)
            self._refuse(f"write `path: hf://datasets/{file}/FOLDER/*` in place of `name`.", "folder")
        takes = [take for take in (draft.get("take"), self._get("take")) if take]
        if "take" in self.used:
            draft.note("`num_samples` draws rows in LLaMA-Factory; here the first ones are taken.")
        values |= {"split": self._get("split"), "take": min(takes, default=None), **self._reading()}
        own = [name for used in self.used if not draft.is_named(name := f"{used}.{self.position}")]
        put_source(draft, key, values, *facts, "take", *own, comment=comment)
        if {"columns.images", "path"} <= self.used.keys() and not draft.get("media_dir"):
            draft.put(f"{key}.image_root", str(self.folder), comment="images are looked for there")
        others = (name for name in draft.facts if name.endswith(f".{self.position}"))
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
        stage = str(self.draft.get("stage", "sft")).lower()
        form = {"pt": "text", "dpo": "preference", "rm": "preference", "kto": "judged"}.get(stage, "sft")
        if bool(self._get("ranking")) != (form == "preference"):
            kind = "with" if form == "preference" else "without"
            self._refuse(f"stage {stage} needs rows {kind} `ranking`, as in LLaMA-Factory.", "ranking", *_ADDRESSES)
        is_alpaca = self._get("formatting") in (None, "alpaca")
        form, cells = self._alpaca(form) if is_alpaca else self._chat(form)
        if form == "judged":
            cells["label"] = self._column("kto_tag")
        elif form == "text":
            advice = "stage pt of LLaMA-Factory reads the first question alone: write a template of `text`."
            self._refuse(advice, "columns.history" if is_alpaca else "formatting")
        else:
            self._refuse("LLaMA-Factory leaves out rows with it: `stage: kto` reads it.", "columns.kto_tag")
        if missing := [name for name, cell in cells.items() if not cell]:
            self._refuse(f"it names no column for `{missing[0]}`, which the stage needs.", "ranking", *_ADDRESSES)
        for name in ("system", "tools", "images") if form != "text" else ():
            if name in FORMATS[form].optional:
                cells[name] = self._column(name)
            else:
                self._refuse(f"format `{form}` has no `{name}`: leave out the rows with it.", f"columns.{name}")
        template = {name: cell for name, cell in cells.items() if "{{" in cell}
        columns = {name: cell for name, cell in cells.items() if name not in template}
        return {"format": form, "columns": renamed(columns), "template": template}

    def _alpaca(self, form: str) -> tuple[str, dict[str, str]]:
        """Return the format and its columns: a line end joins prompt and query; answers in `history` are trained."""
        question, query = self._column("prompt"), self._column("query")
        spoken = _variable(question)
        if question and query:
            spoken = f"[{spoken}, {_variable(query)} | default('')] | select | join('\\n')"
            question = f"{{{{ {spoken} }}}}"
        if form == "text":
            return form, {"text": question}
        history = self._column("history")
        if history and question:
            pair = f"{_turn('user', 'question')}, {_turn('assistant', 'answer')}, "
            loop = f"{{% for question, answer in {_variable(history)} | default([], true) %}}{pair}{{% endfor %}}"
            question = f"[{loop}{_turn('user', spoken)}]"
        if form == "preference":
            return form, {"prompt": question, "chosen": self._column("chosen"), "rejected": self._column("rejected")}
        response = self._column("response")
        if form == "sft" and history and question and response:
            return "messages", {"messages": f"{question[:-1]}, {_turn('assistant', _variable(response))}]"}
        return "prompt_completion" if form == "sft" else form, {"prompt": question, "completion": response}

    def _chat(self, form: str) -> tuple[str, dict[str, str]]:
        """Return the format and its columns: turns in other words than usual get the usual ones by a template."""
        turns = self._column("messages")
        if form == "text":
            return form, {"text": turns}
        tags = {tag: self._get(f"tags.{tag}") if "tags" in self.values else usual[0] for tag, usual in _TAGS.items()}
        is_usual = all(word in (None, "", *_TAGS[tag]) for tag, word in tags.items())
        self.draft.note("conversations whose turns do not alternate are left out in LLaMA-Factory, and read here.")
        if self._get("formatting") == "openai":
            self.draft.note("`formatting: openai` of LLaMA-Factory writes `detailed thinking off` into system turns.")
        role, content = tags.pop("role_tag") or "from", tags.pop("content_tag") or "value"
        speakers = {word: _TAGS[tag][-1] for tag, word in tags.items() if word}

        def cell(rows: str) -> str:
            return f"{{{{ {rows} | tojson }}}}" if is_usual else renamed_turns(rows, role, content, speakers)

        rows = _variable(turns)
        if form == "judged":
            return form, {"prompt": turns and cell(f"{rows}[:-1]"), "completion": cell(f"{rows}[-1:]")}
        whole = turns if is_usual or not turns else cell(rows)
        if form == "preference":  # each answer is one turn
            answers = {name: self._column(name) for name in ("chosen", "rejected")}
            own = {} if is_usual else {name: cell(f"[{_variable(side)}]") for name, side in answers.items() if side}
            return form, {"prompt": whole, **answers, **own}
        form = "conversations" if is_usual and role == "from" else "messages"
        return form, {form: whole}


def _variable(column: str) -> str:
    is_name = column.isidentifier() and not keyword.iskeyword(column) and column not in ("true", "false", "none", "row")
    return column if is_name else f"row[{column!r}]"


def _turn(role: str, content: str) -> str:
    return f"{{{{ {{'role': '{role}', 'content': {content}}} | tojson }}}}"
