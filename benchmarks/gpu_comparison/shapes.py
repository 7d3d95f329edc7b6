"""Models of the sizes that people train, with random weights, and the arithmetic of a step of them."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated layers and grouped queries."""

    model_type: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    is_tied: bool

    def values(self) -> dict[str, Any]:
        """Return them as transformers' config names them."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_width,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": self.is_tied,
        }

    @property
    def num_parameters(self) -> int:
        """Return the number of weights; a head that is tied to the embeddings counts once."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.key_heads)
        norms = 2 * self.width + (2 * self.head_width if self.model_type == "qwen3" else 0)
        layer = attention + 3 * self.width * self.inner + norms
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return self.layers * layer + tables + self.width

    def weight_flops(self, *, is_lora: bool) -> float:
        """Return the operations of the weights per token: 6 N in full; 4 N where they are frozen."""
        return (4.0 if is_lora else 6.0) * self.num_parameters

    def attention_flops(self, length: float) -> float:
        """Return the causal attention's operations per token of a sequence of this length, forward and backward.

        Two products of `heads x head_width x length` multiply-adds, halved by causality, in every layer; the backward
        pass costs twice that, frozen weights or not: attention itself has none.
        """
        return 3.0 * 2 * 2 * self.layers * self.heads * self.head_width * length / 2

    def tiny(self) -> "Shape":
        """Return a model of the same type for which a CPU needs milliseconds."""
        return replace(self, vocabulary=512, width=64, inner=128, layers=2, heads=4, key_heads=2, head_width=16)


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "llama-1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3b": Shape("llama", 128256, 3072, 8192, 28, 24, 8, 128, True),
    # as a Llama, without its few biases: transformers reads no tokenizer of whole words for Qwen2
    "qwen2.5-7b": Shape("llama", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "llama-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
}
