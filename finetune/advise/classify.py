"""A model that classifies text answers with its classes."""

from dataclasses import dataclass
from typing import Any

import torch

from finetune.data.encoding.asking import text_inputs
from finetune.errors import UserError
from finetune.model.processing import load_kept_processing
from finetune.model.saved import SavedModel, load_saved

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
        model = load_saved(saved, key="chat", trust_remote_code=trust_remote_code)
        tokenizer = load_kept_processing(
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
