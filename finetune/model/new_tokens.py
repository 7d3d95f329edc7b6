"""Tokens added to tokenizer and model before training: their ids, their embedding rows and the rows' initial values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.sections.model import NewTokensSection
from finetune.errors import ModelError
from finetune.runtime.parameters import InitContext
from finetune.runtime.seeds import derive_seed


def add_tokens(tokenizer: PreTrainedTokenizerBase, section: NewTokensSection) -> None:
    """Add the tokens; raises ModelError for one that is already in the vocabulary, or is listed twice."""
    vocabulary = tokenizer.get_vocab()
    written = [*section.tokens, *section.special]
    for key, tokens in (("tokens", section.tokens), ("special", section.special)):
        for token in tokens:
            if token in vocabulary:
                raise ModelError(f"model.new_tokens.{key}: `{token}` is already in the vocabulary. Remove it.")
            if written.count(token) > 1:
                raise ModelError(f"model.new_tokens.{key}: `{token}` is listed twice. List it once.")
            if not token.strip():
                raise ModelError(f"model.new_tokens.{key}: a token of whitespace only cannot be matched in text.")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in section.tokens])
    special = [AddedToken(token, special=True, normalized=False) for token in section.special]
    tokenizer.add_tokens(special, special_tokens=True)


def new_token_ids(tokenizer: PreTrainedTokenizerBase, section: NewTokensSection) -> tuple[int, ...]:
    """Return the ids of the new tokens in a tokenizer that has them."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in (*section.tokens, *section.special) if token not in vocabulary]
    if missing:
        raise ModelError(f"model.new_tokens: the tokenizer of the run lacks `{missing[0]}`.")
    return tuple(vocabulary[token] for token in (*section.tokens, *section.special))


def add_embedding_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: NewTokensSection,
    *,
    seed: int,
    init_context: InitContext,
) -> None:
    """Resize embeddings and head to the tokenizer, and initialize the rows of the new tokens.

    The rows depend only on the seed, the token and the existing rows, and are computed in float32. Tied weights stay
    tied; a head's bias starts at zero. A rank that builds on the meta device is only resized. Collective under ZeRO-3.
    """
    ids = new_token_ids(tokenizer, section)
    if model.config.get_text_config().vocab_size < len(tokenizer):
        with torch.random.fork_rng(devices=()):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if init_context.on_meta_device:
        return
    texts = (*section.tokens, *section.special)
    num_existing = min(ids)
    for weight in _embedding_weights(model):
        with torch.no_grad(), init_context.gather([weight]):
            existing = weight[:num_existing].float()  # [tokens, width]
            rows = [
                _INITIALIZERS[section.init](
                    existing, _subword_ids(tokenizer, text, below=num_existing), derive_seed(seed, "new tokens", text)
                )
                for text in texts
            ]
            weight[list(ids)] = torch.stack(rows).to(weight)


def _embedding_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights with a row per token, tied ones once."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return list({id(each.weight): each.weight for each in modules if each is not None}.values())


def _subword_ids(tokenizer: Any, text: str, *, below: int) -> Sequence[int]:
    """Return the ids of the pieces into which the text was split before it became a token."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        pieces = tokenizer.convert_tokens_to_ids(tokenizer._tokenize(text))
    else:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        split = backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer is not None else [(normal, ())]
        pieces = [token.id for word, _ in split for token in backend.model.tokenize(word)]
    return [piece for piece in pieces if piece is not None and piece < below]


def _mean(existing: Tensor, pieces: Sequence[int], seed: int) -> Tensor:
    return existing.mean(dim=0)


def _mean_of_pieces(existing: Tensor, pieces: Sequence[int], seed: int) -> Tensor:
    return existing[list(pieces)].mean(dim=0) if pieces else _mean(existing, pieces, seed)


def _random(existing: Tensor, pieces: Sequence[int], seed: int) -> Tensor:
    """Return normal random numbers with the standard deviation of the existing rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(existing.shape[1], generator=generator).to(existing) * existing.std()


_INITIALIZERS: dict[str, Callable[[Tensor, Sequence[int], int], Tensor]] = {
    "mean": _mean,
    "pieces": _mean_of_pieces,
    "random": _random,
}
