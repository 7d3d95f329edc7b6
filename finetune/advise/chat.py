"""Talk to the model that a run left behind, in the words of its own chat template."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

from finetune.data.encoding.chat import stop_ids, tokenize
from finetune.data.encoding.rendering import render
from finetune.errors import UserError
from finetune.model.hub import told
from finetune.runtime.log import quieten

MODEL_FILES = ("config.json", "adapter_config.json")
ROOM_FOR_ANSWER = 16
"""Positions kept free for the answer before the oldest turns of a long conversation are forgotten."""

Turn = dict[str, str]


def chat(folder: Path, *, max_new_tokens: int = 256) -> None:
    """Answer lines from standard input with the model in the folder (a run's, or its `final/`) until `exit` or the end.

    At a terminal the conversation goes on from line to line, and `clear` begins a new one; piped lines are questions of
    their own. Greedy; the answer appears as it is made. Raises UserError where there is no model to talk to.
    """
    quieten(is_main=True)
    speaker = load_speaker(folder, max_new_tokens=max_new_tokens)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("`exit` ends, `clear` begins a new conversation.")
    turns: list[Turn] = []
    for line in _lines(is_terminal=is_terminal):
        if line == "clear" or not is_terminal:
            turns = []
        if line != "clear":
            turns.append({"role": "user", "content": line})
            turns.append({"role": "assistant", "content": speaker.answer(turns)})


@dataclass(frozen=True)
class Speaker:
    """A model and its tokenizer, ready to answer."""

    model: Any
    tokenizer: Any
    max_new_tokens: int

    def answer(self, turns: list[Turn]) -> str:
        """Return the model's next turn and print it while it is made; forgets the oldest turns that do not fit."""
        tokens = self._prompt(turns)
        limit = self._limit()
        while limit is not None and len(tokens) + ROOM_FOR_ANSWER > limit and len(turns) > 1:
            turns = turns[2:]
            tokens = self._prompt(turns)
        room = self.max_new_tokens if limit is None else max(min(self.max_new_tokens, limit - len(tokens)), 1)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=sorted(stop_ids(self.tokenizer)) or None,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        input_ids = torch.tensor([tokens], device=self.model.device)  # [1, length]
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = self.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings, streamer=streamer
        )
        return str(self.tokenizer.decode(made[0, len(tokens) :], skip_special_tokens=True)).strip()

    def _prompt(self, turns: list[Turn]) -> list[int]:
        if self.tokenizer.chat_template:
            return tokenize(self.tokenizer, render(self.tokenizer, turns, with_answer_cue=True).text)
        return list(self.tokenizer(turns[-1]["content"])["input_ids"])  # no template: the text is simply continued

    def _limit(self) -> int | None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return int(limit) if limit else None


def load_speaker(folder: Path, *, max_new_tokens: int = 256) -> Speaker:
    """Return the model of the folder, or an adapter on its base, on the accelerator where there is one."""
    place = _model_folder(folder)
    with told(str(place), key="chat"):
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Speaker(model.to(device or "cpu").eval(), tokenizer, max_new_tokens)


def _model_folder(folder: Path) -> Path:
    for place in (folder, folder / "final"):
        if any((place / name).is_file() for name in MODEL_FILES):
            return place.absolute()
    what = "holds no model (neither config.json nor adapter_config.json)" if folder.is_dir() else "does not exist"
    raise UserError(f"The folder {folder} {what}. Name the `final/` folder that a finished run has written.")


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """Yield what is typed or piped, without blanks around and without empty lines, until `exit` or the end."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if line == "exit":
            return
        if line:
            yield line
