"""Rows on which the trained model and the exported folder are compared, and their logits."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.export.save import Preprocessors
from finetune.model.processing import HOSTILE_TEXTS

NUM_ROWS = 4
MAX_ROW_TOKENS = 256
"""Limited so that a forward pass is cheap on a CPU."""

MAX_POSITIONS = 32
"""The number of positions per row whose logits are compared; each may have 200,000 logits."""

TOKEN_HEADS = frozenset({"causal_lm", "seq2seq_lm", "masked_lm", "token_classification", "image_text_to_text"})
"""Heads with logits for each token."""

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, 12 times in 2026.",
    "def f(x):\n    return x ** 2",
    "Ein kurzer Satz mit Ärger; und noch einer.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
)


@dataclass(frozen=True)
class VerificationRow:
    """Inputs of one forward pass, and the flat positions whose logits are compared; None for all."""

    inputs: Mapping[str, Tensor]
    positions: Tensor | None


def verification_row(inputs: Mapping[str, Tensor], *, head: str) -> VerificationRow:
    """Return the row of these inputs; text without images is truncated."""
    if "input_ids" in inputs and all(
        tensor.dim() == 2 and len(tensor) == len(inputs["input_ids"]) for tensor in inputs.values()
    ):
        inputs = {name: tensor[:, :MAX_ROW_TOKENS].clone() for name, tensor in inputs.items()}
    if head not in TOKEN_HEADS:
        return VerificationRow(dict(inputs), None)
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != ids.shape or "decoder_input_ids" in inputs:
        mask = torch.ones_like(ids)
    positions = mask.reshape(-1).nonzero().squeeze(-1)
    num_selected = min(len(positions), MAX_POSITIONS)
    selected = torch.linspace(0, len(positions) - 1, num_selected).round().long()
    return VerificationRow(dict(inputs), positions[selected])


def synthetic_rows(
    preprocessors: Preprocessors, *, head: str, start_id: int | None = None
) -> tuple[VerificationRow, ...]:
    """Return rows of synthetic texts or images, for use without training data.

    `start_id` is the first token of a decoder.
    """
    if preprocessors.text is None:
        encoded = [preprocessors.processor(_image(shade), return_tensors="pt") for shade in (0, 80, 160, 240)]
        return tuple(verification_row(dict(inputs), head=head) for inputs in encoded)
    if head == "image_text_to_text":
        processor = preprocessors.processor
        mark = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", "<image>")
        inputs = processor(text=[f"{mark} What is this?"], images=[_image(120)], return_tensors="pt")
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        return (verification_row(tensors, head=head),)
    tokenizer = preprocessors.text.tokenizer
    rows = []
    for text in _SENTENCES:
        ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if head == "seq2seq_lm":
            first = torch.full((1, 1), start_id if start_id is not None else tokenizer.pad_token_id)
            inputs["decoder_input_ids"] = torch.cat([first, ids], dim=1)
        rows.append(verification_row(inputs, head=head))
    return tuple(rows)


def _image(shade: int) -> Image.Image:
    image = Image.new("RGB", (64, 64), (shade, 255 - shade, 128))
    image.paste((255, 255, 255), (8, 8, 24 + shade // 8, 40))
    return image


def logits_of(model: nn.Module, rows: Sequence[VerificationRow], *, device: torch.device) -> list[Tensor]:
    """Return the model's logits at the rows' positions, float32 on the CPU. Collective if the model is sharded."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = [_logits(model, row, device) for row in rows]
    model.train(was_training)
    return logits


def _logits(model: nn.Module, row: VerificationRow, device: torch.device) -> Tensor:
    inputs: dict[str, Any] = {name: value.to(device) for name, value in row.inputs.items()}
    if "input_ids" in row.inputs and row.positions is not None:
        inputs["use_cache"] = False
    output = model(**inputs)
    logits = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
    flat = logits.reshape(-1, logits.shape[-1])
    selected: Tensor = flat if row.positions is None else flat[row.positions.to(device)]
    return selected.float().cpu()


NUM_TEXTS = 200
MAX_CHARACTERS = 2_000

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 12 x 12?"}, {"role": "assistant", "content": "144."}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " Name\ta color "},
        {"role": "assistant", "content": "Blue"},
    ],
    [
        {"role": "user", "content": "héllo"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ],
)


_SURROGATE = re.compile("[\ud800-\udfff]")


def expected_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, renders: Callable[[list[dict[str, str]]], bool]
) -> dict[str, Any]:
    """Return the tokenizer's ids for these texts and for difficult ones, and the conversations it can render.

    If there are too few texts, they are completed with decoded tokens of the vocabulary. `renders` returns whether the
    template can render a conversation within the limits for untrusted templates.
    """
    rendered = []
    for turns in CONVERSATIONS:
        if tokenizer.chat_template and renders(turns):
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            rendered.append({"turns": turns, "text": text, "arguments": {}})
    names = [f"{token} a{token}b " for token in islice(map(str, tokenizer.all_special_tokens), 10)]
    own = [*HOSTILE_TEXTS, *names, *(str(conversation["text"]) for conversation in rendered)]
    joined = (first + second for first, second in pairwise(reversed(HOSTILE_TEXTS)))
    ids = range(len(tokenizer))
    decoded = (tokenizer.decode(ids[start : start + 8]) for start in ids[:: max(1, len(ids) // NUM_TEXTS)])
    candidates = chain(own, (text[:MAX_CHARACTERS] for text in texts), joined, decoded)
    encoded = []
    valid = (text for text in candidates if not _SURROGATE.search(text))  # tokenizers only read valid Unicode
    for number, text in enumerate(islice(dict.fromkeys(valid), NUM_TEXTS)):
        special = number % 2 == 0
        token_ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        encoded.append({"text": text, "special": special, "ids": token_ids})
    return {
        "class": type(tokenizer).__name__,
        "texts": encoded,
        "conversations": rendered,
        "special_ids": {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
