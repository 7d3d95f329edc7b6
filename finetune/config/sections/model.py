"""`model:` - which weights to start from, how they are held in memory, and which of them learn."""

from typing import Annotated, Any, Literal

from pydantic import Field

from finetune.config.section import (
    MAX_FACTOR,
    LayerNumber,
    NameOrPath,
    Path,
    Pixels,
    PositiveFactor,
    Section,
    Shift,
    Strings,
    Width,
    key,
)

DType = Literal["float32", "bfloat16", "float16"]
Recomputing = bool | Literal["selective"] | Annotated[int, Field(ge=2, le=10_000)]
BatchNorm = Literal["frozen"] | Annotated[int, Field(ge=2, le=1 << 24)]
LayerNumbers = Annotated[tuple[LayerNumber, ...], Field(strict=False)]
Shifts = Annotated[tuple[Shift, ...], Field(strict=False)]
Scales = Annotated[tuple[PositiveFactor, ...], Field(strict=False)]


class FromConfigSection(Section):
    """An architecture with random weights: `model_type` plus any value of that model type's config."""

    model_type: str = key("transformers model type, such as `llama`, `qwen3` or `gpt2`.")
    values: dict[str, Any] = key(
        "Values of that model type's config (`hidden_size: 64`); others keep its defaults.", {}
    )


class TrainTokenizerSection(Section):
    """A byte-level BPE tokenizer trained on the run's own training rows."""

    vocabulary_size: int = key("Size of the vocabulary, special tokens included.", 4096, ge=300, le=1 << 22)


class TokenizerSection(Section):
    """Where the tokenizer comes from; unset, it comes with the model."""

    name: NameOrPath | None = key("Hub name, or a folder when it begins with `.`, `/` or `~`.", None)
    train: TrainTokenizerSection | None = key("Train a byte-level BPE tokenizer on the training rows.", None)


class LoraSection(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) on a frozen base, through peft."""

    rank: Width = key("Rank of the adapters.", 16)
    alpha: float = key(
        "Scale numerator: the update is multiplied by alpha / rank (by alpha / sqrt(rank) with rsLoRA).",
        32.0,
        gt=0,
        le=MAX_FACTOR,
    )
    dropout: float = key("Dropout on the adapters' input.", 0.0, ge=0.0, lt=1.0)
    target_modules: Strings | Literal["all-linear"] = key(
        "Names of the modules that get an adapter; `all-linear` is every linear layer but the head.", "all-linear"
    )
    modules_to_save: Strings = key("Modules that are trained in full and saved beside the adapter.", ())
    rslora: bool = key("Rank-stabilised scaling (Kalajdzievski, 2023, arXiv:2312.03732).", False)
    dora: bool = key("Weight-decomposed adapters (Liu et al., 2024, arXiv:2402.09353).", False)
    init: Literal["default", "gaussian", "pissa", "olora", "loftq"] = key(
        "First values: `default` and `gaussian` change nothing at first; `pissa` (Meng et al., 2024, arXiv:2404.02948) "
        "and `olora` (Büyükakyüz, 2024, arXiv:2406.01775) take principal parts out of the weights; `loftq` (Li et al., "
        "2023, arXiv:2310.08659) makes up for what quantisation loses.",
        "default",
    )
    layers: LayerNumbers = key("Numbers of the layers that get adapters, from 0; unset, all.", ())
    rank_pattern: dict[str, Width] = key("Another rank for modules whose name ends so: `{q_proj: 32}`.", {})
    alpha_pattern: dict[str, Shift] = key("Another alpha for modules whose name ends so.", {})


class Ia3Section(Section):
    """Learnt scales on activations (Liu et al., 2022, arXiv:2205.05638)."""

    target_modules: Strings = key("Names of the modules whose activations are scaled; unset, peft's for the model.", ())
    feedforward_modules: Strings = key("Those of them that scale their input instead of their output.", ())


class OftSection(Section):
    """Orthogonal fine-tuning (Qiu et al., 2023, arXiv:2306.07280)."""

    block_size: Width = key("Size of the orthogonal blocks, which divides every adapted layer's inputs.", 32)
    dropout: float = key("Share of the blocks that are left out.", 0.0, ge=0.0, lt=1.0)
    target_modules: Strings | Literal["all-linear"] = key("As those of `model.lora`.", "all-linear")


class PromptTuningSection(Section):
    """Learnt tokens before the text (Lester et al., 2021, arXiv:2104.08691)."""

    num_tokens: Width = key("How many.", 16)
    init_text: str | None = key(
        "Text whose embeddings they begin as; unset, those of tokens drawn from the vocabulary.", None
    )


class PrefixTuningSection(Section):
    """Learnt keys and values before the text, in every layer (Li & Liang, 2021, arXiv:2101.00190)."""

    num_tokens: Width = key("How many.", 16)


class QuantizationSection(Section):
    """The frozen base in few bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314)."""

    method: Literal["bitsandbytes", "torchao"] = key(
        "The library (extra `quantization`, or `torchao`, which has 8 bits alone here).", "bitsandbytes"
    )
    bits: Literal[4, 8] = key("Bits of a weight.", 4)
    kind: Literal["nf4", "fp4"] = key("bitsandbytes, 4 bits: normal floats or floats.", "nf4")
    double: bool = key("bitsandbytes, 4 bits: quantise the scales, too.", True)
    compute_dtype: DType = key("Type in which the weights are multiplied.", "bfloat16")


class NewTokensSection(Section):
    """Tokens that the tokenizer and the model are given before training."""

    tokens: Strings = key("Ordinary ones.", ())
    special: Strings = key("Special ones, such as `<|tool|>`.", ())
    init: Literal["mean", "pieces", "random"] = key(
        "Their first embeddings: the mean of all, the mean of those of the pieces that the text was before, or random.",
        "mean",
    )


class ImageProcessorSection(Section):
    """How images are scaled for a model that is built `from_config`, which brings no image processor."""

    name: NameOrPath | None = key("Hub name or folder of one, in place of the values.", None)
    size: Pixels = key("Height and width in pixels.", 224)
    mean: Shifts = key("Mean of each channel, which is subtracted.", (0.5, 0.5, 0.5), min_length=1, max_length=4)
    std: Scales = key(
        "Standard deviation of each channel, by which is divided.", (0.5, 0.5, 0.5), min_length=1, max_length=4
    )


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
    gradient_checkpointing: Recomputing = key(
        "Recompute activations in the backward pass: `true` all of every layer (least memory, about a third more "
        "time); a number n, of one in n layers; `selective`, all but the results of matrix products and attention "
        "(Korthikanti et al., 2022, arXiv:2205.05198).",
        False,
    )
    activation_offload: bool = key(
        "Keep activations in the host's memory between forward and backward pass. Needs a GPU.", False
    )
    compile: Literal["off", "regional", "full"] = key(
        "torch.compile: `regional` compiles one layer of each kind, soon done; `full` the whole body in one, which "
        "takes minutes for a large model. For GPUs; the first steps take longer.",
        "off",
    )
    batch_norm: BatchNorm | None = key(
        "`frozen`: batch norms keep their running statistics, as is usual in fine-tuning and unset for pre-trained "
        "weights. A number: they normalise over so many consecutive samples of the step (Hoffer et al., 2017, "
        "arXiv:1705.08741), which does not depend on processes and microbatches. Required for a new model with such.",
        None,
    )
    freeze: Strings = key("Patterns (`fnmatch`, such as `model.embed_tokens.*`) of parameters that do not learn.", ())
    train_only: Strings = key(
        "Patterns of the only parameters that learn, such as `*embed_tokens*` or `lm_head.*`; or write `freeze`.", ()
    )
    lora: LoraSection | None = key(
        "Train adapters instead of the model's own weights. At most one kind of adapters.", None
    )
    ia3: Ia3Section | None = key("Learnt scales on activations.", None)
    oft: OftSection | None = key("Orthogonal adapters.", None)
    prompt_tuning: PromptTuningSection | None = key("Learnt tokens before the text.", None)
    prefix_tuning: PrefixTuningSection | None = key("Learnt keys and values before the text.", None)
    adapter: Path | None = key("Continue from the adapter in this folder, which also says what kind it is.", None)
    quantization: QuantizationSection | None = key("Hold the frozen base in few bits.", None)
    new_tokens: NewTokensSection | None = key("Tokens to add to tokenizer and model.", None)
    image_processor: ImageProcessorSection | None = key(
        "How images are scaled; unset, as the model's own processor does.", None
    )
    cache_folder: Path | None = key("Where hub downloads are kept; unset, the hub's own default.", None)
