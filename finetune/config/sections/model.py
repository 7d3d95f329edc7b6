"""`model:` - which weights to start from, how they are held in memory, and which of them learn."""

from typing import Any, Literal

from finetune.config.section import NameOrPath, Path, Positive, Section, Strings, key

DType = Literal["float32", "bfloat16", "float16"]


class FromConfigSection(Section):
    """An architecture with random weights: `model_type` plus any value of that model type's config."""

    model_type: str = key("transformers model type, such as `llama`, `qwen3` or `gpt2`.")
    values: dict[str, Any] = key(
        "Values of that model type's config (`hidden_size: 64`); others keep its defaults.", {}
    )


class TrainTokenizerSection(Section):
    """A byte-level BPE tokenizer trained on the run's own training rows."""

    vocabulary_size: int = key("Size of the vocabulary, special tokens included.", 4096, ge=300)


class TokenizerSection(Section):
    """Where the tokenizer comes from; unset, it comes with the model."""

    name: NameOrPath | None = key("Hub name, or a folder when it begins with `.`, `/` or `~`.", None)
    train: TrainTokenizerSection | None = key("Train a byte-level BPE tokenizer on the training rows.", None)


class LoraSection(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) on a frozen base, through peft."""

    rank: Positive = key("Rank of the adapters.", 16)
    alpha: float = key(
        "Scale numerator: the update is multiplied by alpha / rank (by alpha / sqrt(rank) with rsLoRA).", 32.0, gt=0
    )
    dropout: float = key("Dropout on the adapters' input.", 0.0, ge=0.0, lt=1.0)
    target_modules: Strings | Literal["all-linear"] = key(
        "Names of the modules that get an adapter; `all-linear` is every linear layer but the head.", "all-linear"
    )
    modules_to_save: Strings = key("Modules that are trained in full and saved beside the adapter.", ())
    rslora: bool = key("Rank-stabilised scaling (Kalajdzievski, 2023, arXiv:2312.03732).", False)
    dora: bool = key("Weight-decomposed adapters (Liu et al., 2024, arXiv:2402.09353).", False)


class ModelSection(Section):
    """Which weights to start from, how they are held in memory, and which of them learn."""

    name: NameOrPath | None = key(
        "Hub name, or a folder when it begins with `.`, `/` or `~`. Exactly one of `name` and `from_config`.", None
    )
    revision: str | None = key("Branch, tag or commit on the hub.", None)
    from_config: FromConfigSection | None = key(
        "Build the model from its config with random weights drawn from `run.seed`.", None
    )
    tokenizer: TokenizerSection | None = key(
        "Another tokenizer than the model's own; required with `from_config`.", None
    )
    trust_remote_code: bool = key("Run Python code that comes with a hub model. Off unless written.", False)
    dtype: DType = key(
        "Type in which weights are held. `float32` keeps master weights; frozen weights under LoRA may be `bfloat16` "
        "at no loss.",
        "float32",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = key(
        "Attention implementation; `auto` lets transformers choose.", "auto"
    )
    gradient_checkpointing: bool = key(
        "Recompute activations in the backward pass: less memory, about a third more time.", False
    )
    freeze: Strings = key("Patterns (`fnmatch`, such as `model.embed_tokens.*`) of parameters that do not learn.", ())
    lora: LoraSection | None = key("Train adapters instead of the model's own weights.", None)
    cache_folder: Path | None = key("Where hub downloads are kept; unset, the hub's own default.", None)
