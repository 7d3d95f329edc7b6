"""A job while it is put together: our keys, the peer's keys that each is from, and what becomes of the others.

And what the peers' rows and prompts have in common.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.config.formatting import did_you_mean
from finetune.config.schema import node_at
from finetune.migration.rules import (
    OUT_OF_SCOPE,
    NoCounterpart,
    PeerTable,
    Rule,
    is_off,
    read_defaults,
    read_table,
)
from finetune.migration.source import Leaf, PeerFile
from finetune.runtime.text.terminal import format_json

Fate = Literal["mapped", "not_needed", "not_possible", "unknown"]
UNSET = "it is unset in the file, too"
OFF = "it is off in the file, too"
_SPEED_ALONE = (
    *("data.num_workers", "data.pin_memory", "data.persistent_workers", "data.prefetch_factor", "train.tf32"),
    "data.batching.padding_free",
)
"""Keys that change speed alone: a peer's unwritten defaults of these are not taken."""


@dataclass(frozen=True)
class KeyOutcome:
    """The outcome of one of the peer's keys: our keys, the reason that it has none, or what to do instead."""

    fate: Fate
    text: str = ""


@dataclass
class DraftEntry:
    """One of our keys: its value, the peer's keys that it is from, and what else is to be known about it."""

    value: Any
    leaves: tuple[str, ...] = ()
    comment: str = ""


@dataclass
class Draft:
    """The job so far. Every leaf of the file gets exactly one outcome."""

    file: PeerFile
    gpus: int
    peer: "PeerTrainer"
    entries: dict[str, DraftEntry] = field(default_factory=dict)
    outcomes: dict[str, KeyOutcome] = field(default_factory=dict)
    facts: dict[str, tuple[Any, Leaf]] = field(default_factory=dict)
    assumed: dict[str, tuple[Any, str]] = field(default_factory=dict)  # facts that are the peer's unwritten defaults
    unwritten: dict[str, tuple[Any, str]] = field(default_factory=dict)  # our keys by the peer's unwritten defaults
    defaults: set[str] = field(default_factory=set)  # keys that the peer's file gives our default
    notes: list[str] = field(default_factory=list)  # what meant something else there
    strategy: str = "single"
    is_sharded: bool = False  # by FSDP, whatever its keys say
    loads_bf16: bool = False  # the peer loads weights in bf16 if it computes in it

    @property
    def out_of_scope(self) -> str:
        """Return the objective of the file that is not one of ours, empty for others."""
        reasons = {self.outcomes[key].text for key in self.keys_of("not_possible")}
        return next((name for reason, name in OUT_OF_SCOPE.items() if reason in reasons), "")

    def apply(self, leaves: Iterable[Leaf]) -> None:
        """Look up leaves of the file in the peer's table: write its key, keep its fact, or name it."""
        for leaf in leaves:
            rule = self.peer.table.find(leaf.pattern)
            if rule is None:
                hint = did_you_mean(leaf.pattern, self.peer.table.known_keys) or "Look for it in docs/reference/job/."
                self.outcomes[leaf.key] = KeyOutcome("unknown", f"{self.peer.table.title} has no such key. {hint}")
            elif leaf.value is None:
                self.outcomes[leaf.key] = KeyOutcome("not_needed", UNSET)
            else:
                self._apply(leaf, rule)

    def assume(self, *groups: str) -> None:
        """Take the peer's defaults of these groups of its keys for what the file does not say; later groups win."""
        written = {leaf.pattern for leaf in self.file.leaves.values() if leaf.value is not None}
        for group in groups:
            for key, value in read_defaults()["defaults"][group].items():
                rule = self.peer.table.find(key)
                if rule is None or key in written:
                    continue
                if value is None:  # whatever an earlier group has: it follows from other keys
                    for known in (self.assumed, self.unwritten):
                        if f": {key}: " in known.get(rule.name, (None, ""))[1]:
                            del known[rule.name]
                    continue
                origin = f"{group.replace(' ', f' {version_of(group)}, ')}: {key}: {yaml_value(value)}"
                try:
                    converted = rule.convert(value)
                except NoCounterpart as error:
                    if not is_off(value):
                        self.note(f"{origin}, by default: {error}")
                    continue
                if rule.kind == "fact" and rule.name not in self.facts:
                    self.assumed[rule.name] = (converted, origin)
                elif rule.kind == "key":
                    self.unwritten[rule.name] = (converted, origin)
                elif rule.kind == "not_possible" and not is_off(value):
                    self.note(f"{origin}, by default: {rule.why}")

    def write_unwritten(self) -> None:
        """Write the peer's defaults that are others than ours, of the sections that the job has."""
        for key, (value, origin) in self.unwritten.items():
            section = key.rpartition(".")[0]
            is_optional = section in ("model.lora", "model.quantization", "evaluate", "export")
            is_of_task = section.startswith("task.") and section != f"task.{self.value('task.name')}"
            if is_default(key, value) or key in self.entries or key in self.defaults or key in _SPEED_ALONE:
                continue
            if not is_of_task and (not is_optional or self.has(section)):
                whole = self.entries.pop(section, DraftEntry({}))  # a section without keys gets one
                self.outcomes |= dict.fromkeys(whole.leaves, KeyOutcome("mapped", f"the section `{section}`"))
                self.put(key, value, comment=f"the default of {origin}")

    def _apply(self, leaf: Leaf, rule: Rule) -> None:
        if rule.kind == "not_needed":
            self.outcomes[leaf.key] = KeyOutcome("not_needed", rule.why)
            return
        if rule.kind == "not_possible":
            is_harmless = is_off(leaf.value)
            fate: Fate = "not_needed" if is_harmless else "not_possible"
            self.outcomes[leaf.key] = KeyOutcome(fate, OFF if is_harmless else rule.why)
            return
        try:
            value = rule.convert(leaf.value)
        except NoCounterpart as error:
            self.outcomes[leaf.key] = KeyOutcome("not_possible", str(error))
            return
        if rule.kind == "fact":
            name = f"{rule.name}.{leaf.position}" if "[]" in leaf.pattern else rule.name
            if name in self.facts and self.facts[name][0] != value:
                self.outcomes[leaf.key] = KeyOutcome("not_possible", f"`{self.facts[name][1].key}` has another value.")
                return
            self.facts.setdefault(name, (value, leaf))
            if self.facts[name][1] is not leaf:
                self.outcomes[leaf.key] = KeyOutcome("not_needed", f"`{self.facts[name][1].key}` is the same")
        elif is_default(rule.name, value) and rule.name not in self.entries:
            self.defaults.add(rule.name)
            self.outcomes[leaf.key] = KeyOutcome("not_needed", "this is the default here, too")
        else:
            self._write(leaf, rule.name, value)

    def _write(self, leaf: Leaf, key: str, value: Any) -> None:
        other = self.entries.get(key)
        if other is None:
            self.entries[key] = DraftEntry(value, (leaf.key,))
        elif other.value == value or value in (False, None):
            other.leaves += (leaf.key,)
        elif other.value in (False, None):
            other.value, other.leaves = value, (*other.leaves, leaf.key)
        else:
            self.outcomes[leaf.key] = KeyOutcome(
                "not_possible", f"`{other.leaves[0]}` has set `{key}` already. Keep one."
            )
            return
        self.outcomes[leaf.key] = KeyOutcome("mapped", key)

    def note(self, text: str) -> None:
        """Add a line to the comments at the top, once."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, or of the peer's unwritten default; its leaf still needs an outcome."""
        if name in self.facts:
            return self.facts[name][0]
        return self.assumed.get(name, self.assumed.get(name.partition(".")[0], (default,)))[0]

    def is_named(self, name: str) -> bool:
        """Return whether the leaf of a fact has its outcome already, or the fact does not exist."""
        return name not in self.facts or self.facts[name][1].key in self.outcomes

    def put(self, key: str, value: Any, *facts: str, comment: str = "") -> None:
        """Write our key, which is from these facts, or else from the peer's default that the comment names.

        A key of the file that had written it before is part of the same value, or else named as overridden.
        """
        leaves = tuple(self.facts[name][1].key for name in facts if name in self.facts)
        origin = next((self.assumed[name][1] for name in facts if name in self.assumed), "")
        if origin and not leaves and is_default(key, value):
            return
        if origin and not leaves:
            comment = f"the default of {origin}{f' - {comment}' if comment else ''}"
        old = self.entries.get(key)
        if old is not None and old.value == value:
            leaves = (*old.leaves, *(leaf for leaf in leaves if leaf not in old.leaves))
        elif old is not None:
            self.withdraw(key, KeyOutcome("not_possible", f"another key decides `{key}`: {yaml_value(value)}."))
        self.entries[key] = DraftEntry(value, leaves, comment)
        for leaf in leaves:
            self.outcomes[leaf] = KeyOutcome("mapped", key)

    def default(self, key: str, value: Any, comment: str) -> None:
        """Write our key if it is not written yet: the peer's own default is another one."""
        if key not in self.entries and key not in self.defaults:
            self.put(key, value, comment=comment)

    def mapped(self, text: str, *facts: str) -> None:
        """Record that the facts are in the accelerate file, or in a section without keys of its own."""
        self._record(KeyOutcome("mapped", text), facts)

    def drop(self, reason: str, *facts: str) -> None:
        """Record that the facts without an outcome are not needed, for this reason."""
        self._record(KeyOutcome("not_needed", reason), facts)

    def refuse(self, instead: str, *facts: str) -> None:
        """Record that the facts without an outcome are not possible, and what to do instead."""
        self._record(KeyOutcome("not_possible", instead), facts)

    def _record(self, outcome: KeyOutcome, facts: Sequence[str]) -> None:
        for name in facts:
            if not self.is_named(name):
                self.outcomes[self.facts[name][1].key] = outcome

    def withdraw(self, prefix: str, outcome: KeyOutcome) -> None:
        """Remove our keys that begin like this; the leaves that they were from get the outcome instead."""
        for key in [key for key in self.entries if key == prefix or key.startswith(f"{prefix}.")]:
            for leaf in self.entries.pop(key).leaves:
                is_elsewhere = any(leaf in entry.leaves for entry in self.entries.values())
                self.outcomes[leaf] = self.outcomes[leaf] if is_elsewhere else outcome

    def has(self, prefix: str) -> bool:
        """Return whether one of our keys begins like this."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.entries)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of one of our keys."""
        return self.entries[key].value if key in self.entries else default

    def keys_of(self, fate: Fate) -> list[str]:
        """Return the peer's keys with this outcome, in the order of the file."""
        return [key for key in self.file.leaves if self.outcomes[key].fate == fate]

    def require_complete(self) -> None:
        """Check that no key is lost: each leaf has one outcome, and each mapped one is in the job or its files."""
        lost = self.file.leaves.keys() - self.outcomes.keys()
        assert not lost, f"keys without an outcome: {sorted(lost)}"
        written = {leaf for entry in self.entries.values() for leaf in entry.leaves}
        mapped = set(self.keys_of("mapped"))
        assert written <= mapped, f"keys in the job that are not mapped: {sorted(written - mapped)}"
        unwritten = [key for key in mapped - written if " " not in self.outcomes[key].text]
        assert not unwritten, f"mapped keys that are nowhere: {sorted(unwritten)}"


def is_default(key: str, value: Any) -> bool:
    """Return whether the value is the default of one of our keys."""
    node = node_at(key) or {}
    return "default" in node and node["default"] == value and type(node["default"]) is type(value)


def nested(entries: Mapping[str, DraftEntry]) -> dict[str, Any]:
    """Return the entries as nested sections; positions become lists."""
    root: dict[str, Any] = {}
    for key, entry in entries.items():
        *sections, name = key.split(".")
        inner = root
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = entry
    return root


_PLAIN = re.compile(r"(?:[A-Za-z]|~?/|\.{1,2}/)[\w./~-]*")
_NOT_PLAIN = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def yaml_value(value: Any) -> str:
    """Return a value as YAML on one line: JSON, with quotes only if they are needed."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{yaml_value(name)}: {yaml_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(yaml_value(item) for item in value)}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN:
        return value
    return format_json(value)


_INPUT = "{% if input is defined and input %}"
ALPACA_TEXT = (
    f"Below is an instruction that describes a task{_INPUT}, paired with an input that provides further context"
    "{% endif %}. Write a response that appropriately completes the request.\n\n"
    f"### Instruction:\n{{{{ instruction }}}}\n\n{_INPUT}### Input:\n{{{{ input }}}}\n\n{{% endif %}}"
    "### Response:{{ '\\n' }}"  # Jinja removes a line end at the end
)
"""The prompt of Stanford Alpaca, as a template of a row."""

ALPACA_ROWS = {"prompt": ALPACA_TEXT, "completion": "{{ output }}"}


def renamed_turns(turns: str, role: str, content: str, speakers: Mapping[str, str], *more: str) -> str:
    """Return turns as JSON in a template, with our words for these keys and speakers; `more` are keys to add."""
    others = f"turn.items() | rejectattr(0, 'in', {[role, content]})"
    parts = [f"role={speakers}.get(turn[{role!r}], turn[{role!r}])", f"content=turn[{content!r}]", *more]
    turn = f"{{{{ ', ' if not loop.first }}}}{{{{ dict({others}, {', '.join(parts)}) | tojson }}}}"
    return f"[{{% for turn in {turns} %}}{turn}{{% endfor %}}]"


CHAT_NAMES = re.compile(r"instruct|chat|-it\b|phi|qwen", re.IGNORECASE)
"""In the name of a model whose tokenizer has a chat template."""

BUILT_IN = {
    **{name: name for name in ("chatml", "gemma", "llama3", "mistral", "qwen", "zephyr")},
    **{"llama2": "mistral", "gemma2": "gemma", "mistral_v1": "mistral"},
}
"""Our chat templates by the peers' names; Llama 2 has the marks of Mistral."""


@dataclass(frozen=True)
class PeerTrainer:
    """A trainer: its file of keys, and the functions that complete a job."""

    name: str  # of the file, too
    prepare: Callable[[Draft], None]  # task, data and what only it has; before the common part
    finish: Callable[[Draft], None]  # what follows from others there; after the common part

    @property
    def table(self) -> PeerTable:
        """Return what becomes of each of its keys."""
        return read_table(self.name)


def version_of(group: str) -> str:
    """Return the version of the package that a group of defaults is from."""
    return str(read_defaults()["versions"][group.partition(" ")[0]])
