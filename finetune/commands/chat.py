"""`finetune chat`: talk to a model in its own chat template; a text classifier answers with its classes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from finetune.commands.evaluate import find_evaluation_target
from finetune.commands.export import is_run
from finetune.commands.source import use_written_arguments
from finetune.data.encoding.conversation import ChatPrompt, prompt_ids, text_inputs
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import UserError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import (
    SavedModel,
    attach_adapters,
    find_model_folder,
    inspect_model_folder,
    load_saved_base,
    load_saved_model,
)
from finetune.model.processing import has_processing, load_saved_processing
from finetune.runtime.distributed import local_device
from finetune.runtime.seeds import derive_seed
from finetune.runtime.text.terminal import quiet_libraries

_SHOWN = 5


@dataclass(frozen=True)
class Classifier:
    """A text classifier and its tokenizer; it classifies the last message and ignores the conversation."""

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
        """Print and return the most likely classes of the last message with their probabilities, or its score."""
        inputs = text_inputs(self.tokenizer, turns[-1]["content"], return_tensors="pt")
        logits = self.model(**inputs).logits[0].float()
        answer = self._format(logits)
        print(answer)
        return answer

    def with_adapter(self, name: str | None) -> "Classifier":
        """Raise UserError: a classifier has only one adapter."""
        raise UserError("/adapter: a classifier has only the adapter that it was trained with.")

    def _format(self, logits: torch.Tensor) -> str:
        if len(logits) == 1:
            return f"score {logits.item():.4f}"
        is_multi = self.model.config.problem_type == "multi_label_classification"
        probabilities = logits.sigmoid() if is_multi else logits.softmax(dim=-1)
        best = probabilities.argsort(descending=True).tolist()
        shown = [index for index in best if probabilities[index] > 0.5] if is_multi else best[:_SHOWN]
        return ", ".join(f"{self.labels[index]} {probabilities[index]:.4f}" for index in shown) or "none of the classes"


RESERVED_ANSWER_TOKENS = 16
"""Tokens reserved for the answer; the oldest turns of a longer conversation are dropped."""

HELP = """\
exit             exit
/clear           start a new conversation
/system TEXT     set the system message and start a new conversation; without a text, remove it
/adapter NAME    use this adapter; without a name, list the adapters
/base            use the base model without an adapter
/help            show this help"""

COMMANDS = ("clear", "system", "adapter", "base", "help")

Turn = dict[str, str]

_GENERATING = ("causal_lm", "seq2seq_lm", "image_text_to_text")


def chat(
    source: Path,
    *,
    step: int | None = None,
    adapters: Sequence[str] = (),
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system: str | None = None,
    template_arguments: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> None:
    """Answer lines from standard input until `exit` or the end of the input.

    `source` is a model folder or a run: its `final/`, or a checkpoint if the run was stopped or `step` is given. At a
    terminal all lines are one conversation, until `/clear` starts a new one; each piped line is a separate
    conversation. Answers are streamed. Adapters are written `NAME=FOLDER` and share one base. A text classifier answers
    with its classes. Raises UserError if `source` has no such model.
    """
    quiet_libraries(is_main=True)
    sampling = SamplingParams(max_new_tokens, temperature)
    named: dict[str, Path] = {}
    for written in adapters:
        name, equals, folder = written.partition("=")
        if not (name and equals and folder) or "." in name:
            raise UserError(f"--adapter {written}: write NAME=FOLDER, with a name without dots.")
        if name in named:
            raise UserError(f"--adapter {written}: an adapter `{name}` already exists. Choose another name.")
        named[name] = Path(folder).absolute()
    model: Any
    if is_run(source) and (step is not None or find_model_folder(source) is None):
        model = _load_checkpoint(source, sampling, step=step, adapters=named, trust_remote_code=trust_remote_code)
    else:
        if step is not None:
            raise UserError(f"--step {step}: {source} has no checkpoints. Name a run folder, or leave --step out.")
        saved = inspect_model_folder(source, key="chat", trust_remote_code=trust_remote_code)
        if saved.can_generate:
            model = load_chat_model(saved, sampling, adapters=named, trust_remote_code=trust_remote_code)
        elif saved.head != "sequence_classification":
            raise UserError(
                f"{saved.folder}: a `{saved.head}` model does not generate text. Predict the rows of a file with "
                "`finetune generate`."
            )
        elif named:
            raise UserError(
                "--adapter: a classifier has only the adapter that it was trained with. Leave --adapter out."
            )
        else:
            model = Classifier.load(saved, trust_remote_code=trust_remote_code)
    use_written_arguments(model.tokenizer, template_arguments)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("`exit` exits, `/clear` starts a new conversation, `/help` lists all commands.")
    conversation = _ChatSession(model, system)
    for line in _lines(is_terminal=is_terminal):
        conversation.handle_line(line, is_single=not is_terminal)


@dataclass
class _ChatSession:
    """A model, and the conversation with it so far."""

    model: Any
    system: str | None
    turns: list[Turn] = field(default_factory=list)

    def handle_line(self, line: str, *, is_single: bool) -> None:
        """Run a command, or answer; raises UserError for a command that fails in piped input.

        A piped line that starts with a slash but is not a command is a question.
        """
        command, _, rest = line.removeprefix("/").partition(" ")
        if line == "clear" or (line.startswith("/") and (command in COMMANDS or not is_single)):
            try:
                self._run_command(command, rest.strip())
            except UserError as error:
                if is_single:
                    raise
                print(error)
            return
        if is_single:
            self.turns = []
        self.turns.append({"role": "user", "content": line})
        head = [{"role": "system", "content": self.system}] if self.system else []
        self.turns.append({"role": "assistant", "content": self.model.answer([*head, *self.turns])})

    def _run_command(self, command: str, rest: str) -> None:
        if command in ("clear", "system"):
            self.turns = []
            self.system = (rest or None) if command == "system" else self.system
        elif command == "base" or (command == "adapter" and rest):
            self.model = self.model.with_adapter(rest if command == "adapter" else None)
        elif command == "adapter":
            print(f"adapters: {', '.join(self.model.adapters) or 'none'}; in use: {self.model.adapter or 'none'}")
        elif command == "help":
            print(HELP)
        else:
            raise UserError(f"/{command}: unknown command. `/help` lists all commands.")


@dataclass(frozen=True)
class ChatModel:
    """A model and its tokenizer, ready to answer."""

    model: Any
    tokenizer: Any
    sampling: SamplingParams
    adapters: tuple[str, ...] = ()
    adapter: str | None = None  # the one in use; None: the base model answers
    number: list[int] = field(default_factory=lambda: [0])  # of answers drawn so far

    def with_adapter(self, name: str | None) -> "ChatModel":
        """Return the model with this adapter in use, or with none; raises UserError if it is not loaded."""
        if name is not None and name not in self.adapters:
            known = ", ".join(self.adapters) or "none; load one with --adapter NAME=FOLDER"
            raise UserError(f"/adapter {name}: no such adapter is loaded. Loaded: {known}.")
        if name is not None:
            self.model.set_adapter(name)
        return replace(self, adapter=name)

    def answer(self, turns: list[Turn]) -> str:
        """Return the model's next turn and stream it to the terminal; the oldest turns that do not fit are dropped."""
        tokens = self._prompt(turns)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        while (
            limit
            and len(tokens) + RESERVED_ANSWER_TOKENS > limit
            and sum(turn["role"] != "system" for turn in turns) > 1
        ):
            head = turns[:1] if turns[0]["role"] == "system" else []  # it is kept
            turns = [*head, *turns[len(head) + 2 :]]
            tokens = self._prompt(turns)
        maximum = self.sampling.max_new_tokens
        num_free = maximum if not limit else max(min(maximum, limit - len(tokens)), 1)
        self.number[0] += 1
        is_base = bool(self.adapters) and self.adapter is None
        with self.model.disable_adapter() if is_base else nullcontext():
            known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
            (answer,) = generate_batch(
                self.model,
                [tokens],
                [derive_seed("chat", self.number[0])],
                sampling=replace(self.sampling, max_new_tokens=num_free),
                pad_id=int(next(token for token in known if token is not None)),
                stop_ids=stop_ids(self.tokenizer),
                streamer=TextStreamer(
                    self.tokenizer,
                    skip_prompt=not getattr(self.model.config, "is_encoder_decoder", False),
                    skip_special_tokens=True,
                ),
            )
        return str(self.tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def _prompt(self, turns: list[Turn]) -> list[int]:
        return prompt_ids(self.tokenizer, ChatPrompt(turns, has_own_system=turns[0]["role"] == "system"))


def load_chat_model(
    saved: SavedModel, sampling: SamplingParams, *, adapters: Mapping[str, Path], trust_remote_code: bool
) -> ChatModel:
    """Return the model of the folder, or adapters on its base, on the accelerator if there is one."""
    own = {} if saved.adapter is None else {saved.folder.name: saved.folder}
    folders = {**own, **adapters}
    model = load_saved_base(saved, key="chat", trust_remote_code=trust_remote_code)
    if folders:
        model = attach_adapters(model, folders, key="chat")
    source = saved.folder if has_processing(saved.folder, reads="text") else saved.base
    tokenizer = load_saved_processing(source, reads="text", key="chat", trust_remote_code=trust_remote_code).tokenizer
    first = next(iter(folders), None)
    return ChatModel(model.to(local_device()).eval(), tokenizer, sampling, tuple(folders), first)


def _load_checkpoint(
    run: Path, sampling: SamplingParams, *, step: int | None, adapters: Mapping[str, Path], trust_remote_code: bool
) -> ChatModel:
    """Return the model of a run's checkpoint, with its adapter in use if it has one."""
    if adapters:
        raise UserError("--adapter: not available for a checkpoint. Export it first: `finetune export RUN`.")
    target = find_evaluation_target(run, step=step, job=None, overrides=(), trust_remote_code=trust_remote_code)
    task = target.task()
    if task.head not in _GENERATING:
        raise UserError(f"{target.source}: a `{task.head}` model does not generate text. Use `finetune generate`.")
    model = target.load_weights(target.initial_model(task))
    print(f"chatting with {target.source.name} of {target.source.parent.parent}")
    return ChatModel(model.to(local_device()).eval(), target.run_inputs.processing.tokenizer, sampling)


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """Yield the stripped, non-empty lines of standard input, until `exit` or its end."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not {error.encoding} text. Send it in that encoding.") from error
        if line in ("exit", "/exit"):
            return
        if line:
            yield line
