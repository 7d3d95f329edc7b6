"""`finetune chat`: talk to a model in its own chat template."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from finetune.commands.evaluate import find_evaluation_target
from finetune.commands.export import is_run
from finetune.commands.source import use_written_arguments
from finetune.data.encoding.conversation import ChatPrompt, prompt_ids
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import UserError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import (
    SavedModel,
    attach_adapters,
    find_model_folder,
    inspect_model_folder,
    load_saved_base,
)
from finetune.model.processing import has_processing, load_saved_processing
from finetune.runtime.distributed import local_device
from finetune.runtime.seeds import derive_seed
from finetune.runtime.text.terminal import quiet_libraries
from finetune.task.causal_lm import pad_id

RESERVED_ANSWER_TOKENS = 16
"""Tokens reserved for the answer; the oldest turns of a longer conversation are dropped."""

BASE = "base"
"""The name with which `/adapter` switches all adapters off."""

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
    conversation. Answers are streamed. Adapters are written `NAME=FOLDER` and share one base. Raises UserError if
    `source` has no model that generates text.
    """
    quiet_libraries(is_main=True)
    sampling = SamplingParams(max_new_tokens, temperature)
    named = _named_adapters(adapters)
    if is_run(source) and (step is not None or find_model_folder(source) is None):
        if named:
            raise UserError("--adapter: not available for a checkpoint. Export it first: `finetune export RUN`.")
        model = _load_checkpoint(source, sampling, step=step, trust_remote_code=trust_remote_code)
    else:
        if step is not None:
            raise UserError(f"--step {step}: {source} has no checkpoints. Name a run folder, or leave --step out.")
        saved = inspect_model_folder(source, key="chat", trust_remote_code=trust_remote_code)
        if not saved.can_generate:
            raise _not_generating(saved.folder, saved.head)
        model = load_chat_model(saved, sampling, adapters=named, trust_remote_code=trust_remote_code)
    use_written_arguments(model.tokenizer, template_arguments)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("`exit` exits, `/clear` starts a new conversation, `/adapter NAME` switches to another adapter.")
    turns: list[Turn] = []
    for line in _lines(is_terminal=is_terminal):
        command, _, name = line.partition(" ")
        if command == "/clear" or not is_terminal:
            turns = []
        if command == "/adapter":
            try:
                model = model.with_adapter(name.strip())
            except UserError as error:
                if not is_terminal:
                    raise
                print(error)
        elif command != "/clear":
            turns.append({"role": "user", "content": line})
            head = [{"role": "system", "content": system}] if system else []
            turns.append({"role": "assistant", "content": model.answer([*head, *turns])})


def _named_adapters(texts: Sequence[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or "." in name or name in named or name == BASE:
            raise UserError(f"--adapter {text}: write NAME=FOLDER, each with another name, without dots, not `{BASE}`.")
        named[name] = Path(folder).absolute()
    return named


def _not_generating(source: Path, head: str) -> UserError:
    return UserError(
        f"{source}: a `{head}` model does not generate text. Predict the rows of a file with `finetune generate`."
    )


@dataclass(frozen=True)
class ChatModel:
    """A model and its tokenizer, ready to answer."""

    model: Any
    tokenizer: Any
    sampling: SamplingParams
    adapters: tuple[str, ...] = ()
    adapter: str | None = None  # the one in use; None: the base model answers
    number: list[int] = field(default_factory=lambda: [0])  # of answers drawn so far

    def with_adapter(self, name: str) -> "ChatModel":
        """Return the model with this adapter in use, or with none for `base`; raises UserError if it is not loaded."""
        if name not in (BASE, *self.adapters):
            raise UserError(f"/adapter {name}: no such adapter is loaded. Loaded: {', '.join((BASE, *self.adapters))}.")
        if name == BASE:
            return replace(self, adapter=None)
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
            (answer,) = generate_batch(
                self.model,
                [tokens],
                [derive_seed("chat", self.number[0])],
                sampling=replace(self.sampling, max_new_tokens=num_free),
                pad_id=pad_id(self.tokenizer),
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


def _load_checkpoint(run: Path, sampling: SamplingParams, *, step: int | None, trust_remote_code: bool) -> ChatModel:
    """Return the model of a run's checkpoint, with its adapter in use if it has one."""
    target = find_evaluation_target(run, step=step, job=None, overrides=(), trust_remote_code=trust_remote_code)
    task = target.task()
    if task.head not in _GENERATING:
        raise _not_generating(target.source, task.head)
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
