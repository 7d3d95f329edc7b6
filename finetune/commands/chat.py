"""`finetune chat`: talk to a model in its own chat template; a text classifier answers with its classes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from finetune.data.encoding.prompts import ChatPrompt, prompt_ids, text_inputs
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import UserError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import (
    SavedModel,
    attach_adapters,
    inspect_model_folder,
    load_saved_base,
    load_saved_model,
)
from finetune.model.processing import has_processing, load_saved_processing
from finetune.runtime.seeds import derive_seed
from finetune.runtime.text.library_output import quiet_libraries

_SHOWN = 5


@dataclass(frozen=True)
class Classifier:
    """A text classifier and its tokenizer; it has no conversation, only the last thing that was said."""

    model: Any
    tokenizer: Any
    labels: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    adapter: str | None = None

    @classmethod
    def load(cls, saved: SavedModel, *, trust_remote_code: bool) -> "Classifier":
        """Return the model of the folder, on the CPU."""
        model = load_saved_model(saved, key="chat", trust_remote_code=trust_remote_code)
        tokenizer = load_saved_processing(
            saved.folder, reads="text", key="chat", trust_remote_code=trust_remote_code
        ).tokenizer
        return cls(model, tokenizer, saved.labels)

    @torch.no_grad()
    def answer(self, turns: list[dict[str, str]]) -> str:
        """Return and print the likeliest classes of the last turn's text with their probabilities, or its score."""
        inputs = text_inputs(self.tokenizer, turns[-1]["content"], return_tensors="pt")
        logits = self.model(**inputs).logits[0].float()
        said = self._said(logits)
        print(said)
        return said

    def with_adapter(self, name: str | None) -> "Classifier":
        """Refuse: there is nothing to switch to."""
        raise UserError("/adapter: a model that classifies has the one it was trained with.")

    def _said(self, logits: torch.Tensor) -> str:
        if len(logits) == 1:
            return f"score {logits.item():.4f}"
        is_multi = self.model.config.problem_type == "multi_label_classification"
        chances = logits.sigmoid() if is_multi else logits.softmax(dim=-1)
        best = chances.argsort(descending=True).tolist()
        shown = [place for place in best if chances[place] > 0.5] if is_multi else best[:_SHOWN]
        return ", ".join(f"{self.labels[place]} {chances[place]:.4f}" for place in shown) or "none of the classes"


RESERVED_ANSWER_TOKENS = 16
"""Positions kept free for the answer before the oldest turns of a long conversation are forgotten."""

HELP = """\
exit             ends
/clear           begins a new conversation
/system TEXT     gives a system message, and begins a new conversation; without a text, takes it away
/adapter NAME    answers with this adapter; without a name, lists them
/base            answers without any adapter
/help            shows this"""

COMMANDS = ("clear", "system", "adapter", "base", "help")

Turn = dict[str, str]


def chat(
    folder: Path,
    *,
    adapters: Sequence[str] = (),
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Answer lines from standard input with the model in the folder (a run's, or its `final/`) until `exit` or the end.

    At a terminal the conversation goes on from line to line, and `/clear` begins a new one; piped lines are questions
    of their own. The answer appears as it is made. Adapters are written `NAME=FOLDER`; they share one base. A model
    that classifies text answers with its class. Raises UserError where there is no model to talk to.
    """
    quiet_libraries(is_main=True)
    saved = inspect_model_folder(folder, key="chat", trust_remote_code=trust_remote_code)
    sampling = SamplingParams(max_new_tokens, temperature)
    named = _parse_adapters(adapters)
    speaker = _load_any(saved, sampling, adapters=named, trust_remote_code=trust_remote_code)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("`exit` ends, `/clear` begins a new conversation, `/help` lists the rest.")
    talk = _Conversation(speaker, system)
    for line in _lines(is_terminal=is_terminal):
        talk.hear(line, is_on_its_own=not is_terminal)


@dataclass
class _Conversation:
    """A conversation, and what has been said in it so far."""

    speaker: Any
    system: str | None
    turns: list[Turn] = field(default_factory=list)

    def hear(self, line: str, *, is_on_its_own: bool) -> None:
        """Obey a command, or answer; raises UserError where a command cannot be obeyed and nobody could mend it.

        A piped line that begins with a slash and is no command is a question.
        """
        command, _, rest = line.removeprefix("/").partition(" ")
        if line == "clear" or (line.startswith("/") and (command in COMMANDS or not is_on_its_own)):
            try:
                self._run_command(command, rest.strip())
            except UserError as error:
                if is_on_its_own:
                    raise
                print(error)
            return
        if is_on_its_own:
            self.turns = []
        self.turns.append({"role": "user", "content": line})
        head = [{"role": "system", "content": self.system}] if self.system else []
        self.turns.append({"role": "assistant", "content": self.speaker.answer([*head, *self.turns])})

    def _run_command(self, command: str, rest: str) -> None:
        if command in ("clear", "system"):
            self.turns = []
            self.system = (rest or None) if command == "system" else self.system
        elif command == "base" or (command == "adapter" and rest):
            self.speaker = self.speaker.with_adapter(rest if command == "adapter" else None)
        elif command == "adapter":
            print(f"adapters: {', '.join(self.speaker.adapters) or 'none'}; in use: {self.speaker.adapter or 'none'}")
        elif command == "help":
            print(HELP)
        else:
            raise UserError(f"/{command}: there is no such command. `/help` lists them.")


@dataclass(frozen=True)
class ChatModel:
    """A model and its tokenizer, ready to answer."""

    model: Any
    tokenizer: Any
    sampling: SamplingParams
    adapters: tuple[str, ...] = ()
    adapter: str | None = None  # the one in use; None: the base answers alone
    number: list[int] = field(default_factory=lambda: [0])  # of answers drawn so far

    def with_adapter(self, name: str | None) -> "ChatModel":
        """Return the speaker with this adapter in use, or with none; raises UserError for one that is not loaded."""
        if name is not None and name not in self.adapters:
            known = ", ".join(self.adapters) or "none; write --adapter NAME=FOLDER"
            raise UserError(f"/adapter {name}: there is no such adapter. Loaded: {known}.")
        if name is not None:
            self.model.set_adapter(name)
        return replace(self, adapter=name)

    def answer(self, turns: list[Turn]) -> str:
        """Return the model's next turn and print it while it is made; forgets the oldest turns that do not fit."""
        tokens, limit = self._prompt(turns), self._limit()
        while limit is not None and len(tokens) + RESERVED_ANSWER_TOKENS > limit and _can_drop_oldest(turns):
            turns = _without_oldest(turns)
            tokens = self._prompt(turns)
        most = self.sampling.max_new_tokens
        room = most if limit is None else max(min(most, limit - len(tokens)), 1)
        self.number[0] += 1
        with self._adapted():
            (made,) = generate_batch(
                self.model,
                [tokens],
                [derive_seed("chat", self.number[0])],
                sampling=replace(self.sampling, max_new_tokens=room),
                pad_id=self._pad_id(),
                stop_ids=stop_ids(self.tokenizer),
                streamer=TextStreamer(self.tokenizer, skip_prompt=not self._is_encoder(), skip_special_tokens=True),
            )
        return str(self.tokenizer.decode(made, skip_special_tokens=True)).strip()

    def _adapted(self) -> AbstractContextManager[Any]:
        """Return the context in which the adapter in use is at work."""
        context: AbstractContextManager[Any] = (
            self.model.disable_adapter() if self.adapters and self.adapter is None else nullcontext()
        )
        return context

    def _prompt(self, turns: list[Turn]) -> list[int]:
        return prompt_ids(self.tokenizer, ChatPrompt(turns, has_own_system=turns[0]["role"] == "system"))

    def _pad_id(self) -> int:
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return int(next(each for each in known if each is not None))

    def _is_encoder(self) -> bool:
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def _limit(self) -> int | None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None


def load_chat_model(folder: Path, *, max_new_tokens: int = 256) -> ChatModel:
    """Return the model of the folder, or an adapter on its base, on the accelerator where there is one."""
    return _load(
        inspect_model_folder(folder, key="chat"), SamplingParams(max_new_tokens), adapters={}, trust_remote_code=False
    )


def _load_any(
    saved: SavedModel, sampling: SamplingParams, *, adapters: Mapping[str, Path], trust_remote_code: bool
) -> Any:
    if saved.can_generate:
        return _load(saved, sampling, adapters=adapters, trust_remote_code=trust_remote_code)
    if saved.head == "sequence_classification":
        if adapters:
            raise UserError("--adapter: a model that classifies has the one it was trained with. Leave it out.")
        return Classifier.load(saved, trust_remote_code=trust_remote_code)
    raise UserError(
        f"{saved.folder} holds a model of `{saved.head}`, which writes no text. `finetune evaluate` measures it, and "
        "its README.md says how to load it."
    )


def _load(
    saved: SavedModel, sampling: SamplingParams, *, adapters: Mapping[str, Path], trust_remote_code: bool
) -> ChatModel:
    own = {} if saved.adapter is None else {saved.folder.name: saved.folder}
    folders = {**own, **adapters}
    model = load_saved_base(saved, key="chat", trust_remote_code=trust_remote_code)
    if folders:
        model = attach_adapters(model, folders, key="chat")
    place = saved.folder if has_processing(saved.folder, reads="text") else saved.base
    tokenizer = load_saved_processing(place, reads="text", key="chat", trust_remote_code=trust_remote_code).tokenizer
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    first = next(iter(folders), None)
    return ChatModel(model.to(device or "cpu").eval(), tokenizer, sampling, tuple(folders), first)


def _parse_adapters(adapters: Sequence[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for written in adapters:
        name, equals, folder = written.partition("=")
        if not (name and equals and folder) or "." in name:
            raise UserError(f"--adapter {written}: write NAME=FOLDER, the name without dots.")
        if name in named:
            raise UserError(f"--adapter {written}: there is an adapter `{name}` already. Write another name.")
        named[name] = Path(folder).absolute()
    return named


def _can_drop_oldest(turns: Sequence[Turn]) -> bool:
    return sum(turn["role"] != "system" for turn in turns) > 1


def _without_oldest(turns: list[Turn]) -> list[Turn]:
    """Return the turns without the oldest question and its answer; a system message stays."""
    head = turns[:1] if turns[0]["role"] == "system" else []
    return [*head, *turns[len(head) + 2 :]]


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """Yield what is typed or piped, without blanks around and without empty lines, until `exit` or the end."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: is not {error.encoding} text. Send it in that encoding.") from error
        if line in ("exit", "/exit"):
            return
        if line:
            yield line
