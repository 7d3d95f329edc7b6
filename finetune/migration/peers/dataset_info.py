"""LLaMA-Factory's dataset_info.json: where the rows of a dataset are, and what their columns mean.

The rules are those of its `data/parser.py`, `data/converter.py` and `data/loader.py`, version 0.9.5.
"""

import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config.formatting import did_you_mean
from finetune.config.paths import absolute_path, is_url
from finetune.errors import UserError
from finetune.migration.complete import source_of
from finetune.migration.draft import Draft
from finetune.migration.rules import choose, each, fact, no, ours, positive, text, truth
from finetune.migration.source import Leaf, PeerFile, read_peer_file
from finetune.registry.formats import FORMATS

FILE = "dataset_info.json"

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""The columns of rows whose entry has no `columns`."""

_TAGS: Mapping[str, tuple[str, ...]] = {
    **{"role_tag": ("from", "role"), "content_tag": ("value", "content")},
    **{"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)},
    **{"observation_tag": ("observation", "tool"), "function_tag": ("function_call",)},
}
"""The names in turns that are read here: first the default of LLaMA-Factory, last the one that templates write."""

_VIDEO = "only text and images are read here: leave these rows out."

_ENTRY = {
    **{"hf_hub_url": fact("name", text), "file_name": fact("path", text), "cloud_file_name": fact("cloud", text)},
    **each(fact("foreign", text), "ms_hub_url om_hub_url script_url"),
    **{"subset": fact("config", text), "split": fact("split", text), "folder": fact("folder", text)},
    "num_samples": fact("take", positive, note="`num_samples` draws rows there; here the first ones are taken."),
    "formatting": fact(
        "formatting",
        choose({name: name for name in ("alpaca", "sharegpt", "openai")}, "LLaMA-Factory refuses it, too."),
    ),
    "ranking": fact("ranking", truth),
    **{
        f"columns.{name}": fact(f"columns.{name}", text)
        for name in ("prompt", "query", "response", "history", "messages", "system", "tools", "images")
    },
    **{f"columns.{name}": fact(f"columns.{name}", text) for name in ("chosen", "rejected", "kto_tag")},
    **each(no(_VIDEO), "columns.videos columns.audios"),
    **{f"tags.{name}": fact(f"tags.{name}", text) for name in _TAGS},
    **each(ours("nothing is named in it"), "columns tags"),
}
TABLE = {f"{FILE}[].{key}": rule for key, rule in _ENTRY.items()}
"""From the keys of a dataset, whose facts end with its position among those in use."""

_ADDRESS = ("name", "cloud", "path")


@dataclass(frozen=True)
class Source:
    """Where the rows of a dataset are, how they are read, and the facts that say so."""

    address: Mapping[str, Any]  # empty where it is not possible
    reading: Mapping[str, Any] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    image_root: Path | None = None  # the folder of images, where none is written


def read_info(draft: Draft, names: Sequence[str]) -> PeerFile | None:
    """Return dataset_info.json; None without one.

    The keys of the datasets become keys of the draft. Raises UserError where a dataset is not in the file, and
    ConfigError where the file cannot be read.
    """
    places = [folder / draft.get("dataset_dir", "data") / FILE for folder in (Path(), draft.file.path.parent)]
    info = next((read_peer_file(place) for place in places if place.is_file()), None)
    if info is None:
        return None
    leaves: dict[str, Leaf] = {}
    for position, name in enumerate(names):
        leaves |= _leaves_of(info, name, position)
    others = draft.file.leaves
    draft.file = replace(draft.file, leaves=leaves)
    draft.apply(TABLE)
    draft.file = replace(draft.file, leaves={**others, **leaves})
    return info


def source_of_dataset(draft: Draft, info: PeerFile, name: str, position: int) -> Source:
    """Return the source of a dataset."""
    return _Dataset(draft, info.values[name], position).source(info.path.parent.absolute())


@dataclass(frozen=True)
class _EntryLeaf(Leaf):
    """A key of a dataset; the position is that of the dataset among those in use."""

    pattern: str = ""
    position: int = 0


def _leaves_of(info: PeerFile, name: str, position: int) -> dict[str, Leaf]:
    entry = info.values.get(name)
    if not isinstance(entry, Mapping) or not entry:
        raise UserError(f"{info.path}: there is no dataset `{name}`. {did_you_mean(name, info.values)}".rstrip())
    leaves: dict[str, Leaf] = {}
    for leaf in info.leaves.values():
        key = leaf.key.removeprefix(f"{name}.")
        if key != leaf.key and any(f"{key}.".startswith(f"{own}.") for own in entry):
            named = f"{FILE}:{leaf.key}"
            leaves[named] = _EntryLeaf(named, leaf.line, leaf.value, f"{FILE}[].{key}", position)
    return leaves


Cells = dict[str, str | None]
"""For each column of a format, the name of a column, or a template, which has braces."""


@dataclass(frozen=True)
class _Dataset:
    """A dataset: its values in the file, and which of its facts are in the job."""

    draft: Draft
    values: Mapping[str, Any]
    position: int
    used: dict[str, None] = field(default_factory=dict)

    def source(self, folder: Path) -> Source:
        """Return the source; `folder` is that of the file."""
        reading, address = self._reading(), dict[str, Any]()
        if hub := self._get("name"):
            address = source_of(hub, folder) | {"config": self._get("config"), "split": self._get("split")}
            self._refuse(f"write `path: hf://datasets/{hub}/FOLDER/*` in place of `name`.", "folder")
        elif file := self._get("cloud") or self._get("path"):
            address = {"path": file if is_url(file) else absolute_path(file, folder)}
            if self.draft.get(f"split.{self.position}", "train") != "train":
                self._refuse("a file has no splits: write `skip` and `take`.", "split")
        else:
            self._refuse("it is not read here: download the rows, and name their file.", "foreign")
        self._get("take")
        facts = tuple(name for used in self.used if not self.draft.is_named(name := f"{used}.{self.position}"))
        others = [name for name in self.draft.facts if name.endswith(f".{self.position}") and name not in facts]
        self.draft.drop("LLaMA-Factory does not read it for these rows, either", *others)
        has_image_files = {"columns.images", "path"} <= self.used.keys()
        return Source(address, reading, facts, folder if has_image_files else None)

    def _get(self, name: str) -> Any:
        """Return the value of a fact, which is then in use."""
        if value := self.draft.get(f"{name}.{self.position}"):
            self.used[name] = None
        return value

    def _refuse(self, instead: str, *names: str) -> None:
        self.draft.refuse(instead, *(f"{name}.{self.position}" for name in names))

    def _column(self, name: str) -> str | None:
        default = None if "columns" in self.values else _COLUMNS.get(name)
        return self._get(f"columns.{name}") or default

    def _reading(self) -> dict[str, Any]:
        """Return the format of the rows, and a column or a template for each of its columns."""
        task, stage = self.draft.value("task.name"), str(self.draft.get("stage", "sft")).lower()
        purpose = (
            "judged" if stage == "kto" else {"pretrain": "text"}.get(task, "sft" if "sft" in task else "preference")
        )
        if bool(self._get("ranking")) != (purpose == "preference"):
            what = "`ranking: true`" if purpose == "preference" else "a dataset without `ranking`"
            self._refuse(f"stage `{stage}` needs {what}: LLaMA-Factory refuses it, too.", "ranking", *_ADDRESS)
        form, cells = self._alpaca(purpose) if self._get("formatting") in (None, "alpaca") else self._chat(purpose)
        if purpose == "judged":
            cells["label"] = self._column("kto_tag")
        elif purpose != "text":
            self._refuse("at this stage rows with it are left out there: `stage: kto` reads it.", "columns.kto_tag")
        if missing := [ours for ours, cell in cells.items() if not cell]:
            self._refuse(f"it names no column for `{missing[0]}`: LLaMA-Factory leaves its rows out.", *_ADDRESS)
        if purpose != "text":
            names = [name for name in ("tools", "images") if name in FORMATS[form].optional]
            cells |= {name: self._column(name) for name in ("system", *names)}
        if "columns.images" not in self.used:
            self._refuse(f"format `{form}` has no images: leave these rows out.", "columns.images")
        named = {ours: cell for ours, cell in cells.items() if cell and cell != ours}
        template = {ours: cell for ours, cell in named.items() if "{{" in cell}
        return {
            "format": form,
            "columns": {ours: named[ours] for ours in named if ours not in template},
            "template": template,
        }

    def _alpaca(self, purpose: str) -> tuple[str, Cells]:
        """Return the format and its cells: prompt and query are joined by a line end, and `history` is trained, too."""
        asked = [name for key in ("prompt", "query") if (name := self._column(key))]
        question = asked[0] if asked else None
        spoken = _variable(question or "")
        if len(asked) == 2:
            spoken = f"[{spoken}, {_variable(asked[1])} | default('')] | select | join('\\n')"
            question = f"{{{{ {spoken} }}}}"
        if purpose == "text":
            return "text", {"text": question}
        history = self._column("history")
        if history and question:
            pairs = f"{_turn('user', 'question')}, {_turn('assistant', 'answer')}, "
            earlier = f"{{% for question, answer in {_variable(history)} | default([], true) %}}{pairs}{{% endfor %}}"
            question = f"[{earlier}{_turn('user', spoken)}]"
        if purpose == "preference":
            sides = {side: self._column(side) for side in ("chosen", "rejected")}
            return "preference", {"prompt": question, **sides}
        response = self._column("response")
        if history and question and response and purpose == "sft":
            return "messages", {"messages": f"{question[:-1]}, {_turn('assistant', _variable(response))}]"}
        return "judged" if purpose == "judged" else "prompt_completion", {"prompt": question, "completion": response}

    def _chat(self, purpose: str) -> tuple[str, Cells]:
        """Return the format and its cells: turns with unusual names get usual ones by a template."""
        turns, is_openai = self._column("messages"), self._get("formatting") == "openai"
        if purpose == "text":
            self._refuse("stage `pt` reads the first turn alone there: write a template of `text`.", "formatting")
            return "text", {"text": turns}
        tags = {tag: self._get(f"tags.{tag}") if "tags" in self.values else usual[0] for tag, usual in _TAGS.items()}
        keys = (tags.pop("role_tag") or "from", tags.pop("content_tag") or "value")
        is_usual = keys in (("from", "value"), ("role", "content")) and all(
            not name or name in _TAGS[tag] or (is_openai and tag == "function_tag") for tag, name in tags.items()
        )
        self.draft.note("conversations whose turns do not alternate are left out there, and read here.")
        if is_openai:
            self.draft.note("with `formatting: openai`, `detailed thinking off` is added to the system message there.")
            advice = "rename what the turns have: `role` and `content`; `user`, `assistant`, `tool`, `system`."
            self._refuse(advice, *([] if is_usual else [f"tags.{tag}" for tag in _TAGS]))
        roles = {name: _TAGS[tag][-1] for tag, name in tags.items() if name}

        def turns_of(expression: str) -> str:
            if is_usual or is_openai:
                return f"{{{{ {expression} | tojson }}}}"
            speaker = f"turn[{json.dumps(keys[0])}]"
            role = f"{json.dumps(roles)}.get({speaker}, {speaker})"
            turn = f'{{"role": {{{{ {role} | tojson }}}}, "content": {{{{ turn[{json.dumps(keys[1])}] | tojson }}}}}}'
            return f"[{{% for turn in {expression} %}}{turn}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}]"

        named = _variable(turns or "")
        whole = turns if is_usual or is_openai or not turns else turns_of(named)
        if purpose == "judged":
            return "judged", {"prompt": turns and turns_of(f"{named}[:-1]"), "completion": turns_of(f"{named}[-1:]")}
        if purpose == "preference":
            sides = {side: self._column(side) for side in ("chosen", "rejected")}
            if not (is_usual or is_openai):
                sides = {side: name and turns_of(f"[{_variable(name)}]") for side, name in sides.items()}
            return "preference", {"prompt": whole, **sides}
        has_tools = not is_openai and (tags["observation_tag"] or tags["function_tag"])
        form = "messages" if keys == ("role", "content") and is_usual and not has_tools else "conversations"
        return form, {form: whole}


def _variable(column: str) -> str:
    """Return the Jinja expression of a column."""
    is_name = column.isidentifier() and not keyword.iskeyword(column) and column not in ("true", "false", "none", "row")
    return column if is_name else f"row[{json.dumps(column, ensure_ascii=False)}]"


def _turn(role: str, expression: str) -> str:
    """Return the JSON object of a turn in a template."""
    return f'{{"role": "{role}", "content": {{{{ {expression} | tojson }}}}}}'
