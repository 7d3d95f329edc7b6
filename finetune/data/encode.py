"""Turns or text become token ids and the targets among them, exactly: what cannot be told apart is refused."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.chat import after_content, is_special, render, tokenize
from finetune.data.features import Features
from finetune.data.formats import Turn
from finetune.errors import DataError


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Features | None:
    """Return the text, as the tokenizer begins it, ended by end-of-sequence; all tokens but the first are targets.

    None when nothing is left to predict. Raises DataError when the tokenizer has no end-of-sequence token.
    """
    ids = list(tokenizer(text, verbose=False)["input_ids"]) if text else []
    if not ids or ids == [tokenizer.bos_token_id]:
        return None
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        raise DataError(
            f"begins with {tokenizer.bos_token}, which the tokenizer writes itself: it would stand there twice."
        )
    if ids[-1] != _end_of_sequence(tokenizer):
        ids.append(_end_of_sequence(tokenizer))
    is_target = np.ones(len(ids), dtype=bool)
    is_target[0] = False
    return _features(ids, is_target)


def encode_turns(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Features | None:
    """Return the rendered conversation; its targets are the assistant's turns with the token that ends each of them.

    A last turn that the template does not end with a special token is ended with end-of-sequence, a target too.
    None when the assistant says nothing. Raises DataError when the template's rendering of the beginning of a
    conversation is not the beginning of its rendering of the whole, in text and in tokens.
    """
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        return None
    if answers[0] == 0:
        raise DataError("the conversation begins with the assistant: there is nothing that it answers.")
    whole = _Rendering(render(tokenizer, turns), tokenizer)
    is_target = np.zeros(len(whole.ids), dtype=bool)
    start = end = 0
    for place in answers:
        start, end = _answer(turns[: place + 1], whole, tokenizer)
        is_target[start:end] = True
    ends_open = answers[-1] == len(turns) - 1 and not (end > start and is_special(tokenizer, whole.ids[end - 1]))
    if not ends_open:
        return _features(whole.ids, is_target)
    return _features([*whole.ids[:end], _end_of_sequence(tokenizer)], np.append(is_target[:end], True))


def with_system_prompt(turns: Sequence[Turn], system_prompt: str | None) -> Sequence[Turn]:
    """Return the turns led by the system prompt, unless they have one of their own or none is wanted."""
    if system_prompt is None or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, str]:
    """Return digests of everything about the tokenizer that the encoding depends on: part of a cache's key."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        described = json.dumps({name: part for name, part in parts.items() if name not in ("truncation", "padding")})
    else:
        described = repr(sorted(tokenizer.get_vocab().items())) + repr(tokenizer.init_kwargs)
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)))
    return {
        "tokenizer": _digest(type(tokenizer).__name__ + described + special),
        "chat_template": _digest(repr(tokenizer.chat_template)),
    }


class _Rendering:
    """A whole conversation as text and tokens, in which beginnings are looked up."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = text
        self.ids = tokenize(tokenizer, text)
        self._tokenizer = tokenizer

    def num_tokens_of(self, beginning: str, *, what: str) -> int:
        """Return how many of the whole's tokens the beginning makes; raises DataError when it is no beginning."""
        if not self.text.startswith(beginning):
            raise DataError(
                f"the chat template renders {what} in one way when the conversation stops there and in another when it "
                f"goes on, so the assistant's tokens cannot be told apart. {_REMEDY}"
            )
        if len(beginning) == len(self.text):
            return len(self.ids)
        tokens = tokenize(self._tokenizer, beginning)
        if self.ids[: len(tokens)] != tokens:
            edge = f"{beginning[-12:]!r} before {self.text[len(beginning) :][:12]!r}"
            raise DataError(
                f"a token reaches across the end of {what} ({edge}): the model would be trained on other tokens than "
                f"it is asked with. {_REMEDY}"
            )
        return len(tokens)


def _answer(turns: Sequence[Turn], whole: _Rendering, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return where the tokens of the last of `turns` begin and end; whitespace behind its end-of-turn is left out."""
    number = len(turns)
    cue = render(tokenizer, turns[:-1], with_answer_cue=True)
    start = whole.num_tokens_of(cue, what=f"the prompt of turn {number}")
    through = render(tokenizer, turns)
    is_ended = after_content(through[len(cue) :], content=turns[-1]["content"]) != ""
    end = whole.num_tokens_of(through.rstrip() if is_ended else through, what=f"turn {number}")
    return start, max(start, end)


_REMEDY = (
    "Set data.chat_template to `chatml` or to a Jinja file in which what follows never changes what stands before."
)


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so the model could not learn where to stop.")
    return int(tokenizer.eos_token_id)


def _features(ids: list[int], is_target: np.ndarray) -> Features:
    return Features({"input_ids": np.asarray(ids, dtype=np.uint32), "is_target": is_target})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
