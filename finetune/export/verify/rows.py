"""Rows on which the trained model and the exported folder are compared, and the logits that a model gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from finetune.export.save import Preprocessors

NUM_ROWS = 4
LONGEST_ROW = 256
"""Tokens of a row: its forward pass must be cheap on a CPU."""

MAX_POSITIONS = 32
"""Of a row whose logits are compared: one of them may have 200,000 classes."""

TOKEN_HEADS = frozenset({"causal_lm", "seq2seq_lm", "masked_lm", "token_classification", "image_text_to_text"})
"""Heads with logits at each token."""

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, 12 times in 2026.",
    "def f(x):\n    return x ** 2",
    "Ein kurzer Satz mit Ärger; und noch einer.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
)


@dataclass(frozen=True)
class HeldRow:
    """Inputs of one forward pass, and the flat positions whose logits are compared; None for all."""

    inputs: Mapping[str, Tensor]
    positions: Tensor | None


def held_row(inputs: Mapping[str, Tensor], *, head: str) -> HeldRow:
    """Return the row of these inputs, cut where they are text alone."""
    inputs = _cut(inputs)
    if head not in TOKEN_HEADS:
        return HeldRow(inputs, None)
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != ids.shape or "decoder_input_ids" in inputs:
        mask = torch.ones_like(ids)
    places = mask.reshape(-1).nonzero().squeeze(-1)
    count = min(len(places), MAX_POSITIONS)
    chosen = torch.linspace(0, len(places) - 1, count).round().long()
    return HeldRow(inputs, places[chosen])


def _cut(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shape = inputs["input_ids"].shape if "input_ids" in inputs else None
    is_text = shape is not None and all(
        each.dim() == 2 and len(each) == len(inputs["input_ids"]) for each in inputs.values()
    )
    return {name: value[:, :LONGEST_ROW].clone() if is_text else value for name, value in inputs.items()}


def made_up_rows(preprocessors: Preprocessors, *, head: str, start_id: int | None = None) -> tuple[HeldRow, ...]:
    """Return rows of made-up texts or images, where the training's own rows are not at hand.

    `start_id` is the first token of a decoder.
    """
    if preprocessors.text is None:
        images = [_picture(shade) for shade in (0, 80, 160, 240)]
        return tuple(held_row(dict(preprocessors.processor(each, return_tensors="pt")), head=head) for each in images)
    if head == "image_text_to_text":
        return (held_row(_image_and_text(preprocessors.processor), head=head),)
    tokenizer = preprocessors.text.tokenizer
    rows = []
    for text in _SENTENCES:
        ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if head == "seq2seq_lm":
            first = torch.full((1, 1), start_id if start_id is not None else tokenizer.pad_token_id)
            inputs["decoder_input_ids"] = torch.cat([first, ids], dim=1)
        rows.append(held_row(inputs, head=head))
    return tuple(rows)


def _image_and_text(processor: Any) -> dict[str, Tensor]:
    mark = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", "<image>")
    inputs = processor(text=[f"{mark} What is this?"], images=[_picture(120)], return_tensors="pt")
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def _picture(shade: int) -> Image.Image:
    picture = Image.new("RGB", (64, 64), (shade, 255 - shade, 128))
    picture.paste((255, 255, 255), (8, 8, 24 + shade // 8, 40))
    return picture


def logits_of(model: nn.Module, rows: Sequence[HeldRow], *, device: torch.device) -> list[Tensor]:
    """Return the model's logits at the rows' positions, float32 on the CPU. Collective where the model is sharded."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = [_logits(model, row, device) for row in rows]
    model.train(was_training)
    return found


def _logits(model: nn.Module, row: HeldRow, device: torch.device) -> Tensor:
    is_text_model = "input_ids" in row.inputs
    given: dict[str, Any] = {name: value.to(device) for name, value in row.inputs.items()}
    if is_text_model and row.positions is not None:
        given["use_cache"] = False
    output = model(**given)
    logits = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
    flat = logits.reshape(-1, logits.shape[-1])
    chosen: Tensor = flat if row.positions is None else flat[row.positions.to(device)]
    return chosen.float().cpu()
