"""`model:` - which weights to start from, their dtype and attention, adapters, and which parameters are trained."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from finetune.config.section import (
    MAX_FACTOR,
    LayerNumber,
    Length,
    Name,
    NamedSection,
    NameOrPath,
    OneOf,
    Path,
    Pixels,
    PositiveFactor,
    Section,
    Shift,
    Strings,
    Width,
    key,
)
from finetune.registry.model_choices import ATTENTIONS, is_prompt_type, trainable_types

DType = Literal["float32", "bfloat16", "float16"]


def _float32_of_auto(dtype: Any) -> Any:
    """Return the dtype of a model alone; that of a job is resolved before (`RunConfig`)."""
    return "float32" if dtype == "auto" else dtype


WeightDType = Annotated[
    DType, BeforeValidator(_float32_of_auto, json_schema_input_type=Literal["auto", "float32", "bfloat16", "float16"])
]
GradientCheckpointing = bool | Literal["selective"] | Annotated[int, Field(ge=2, le=10_000)]
BatchNorm = Literal["frozen"] | Annotated[int, Field(ge=2, le=1 << 24)]
LayerNumbers = Annotated[tuple[LayerNumber, ...], Field(strict=False)]
Shifts = Annotated[tuple[Shift, ...], Field(strict=False)]
Scales = Annotated[tuple[PositiveFactor, ...], Field(strict=False)]


class FromConfigSection(Section):
    """An architecture with random weights: `model_type` plus any value of that model type's config."""

    model_type: Name = key("transformers model type, such as `llama`, `qwen3` or `gpt2`.")
    values: dict[str, Any] = key(
        "Values of that model type's config (`hidden_size: 64`); others keep their defaults.", {}
    )


class TrainTokenizerSection(Section):
    """A byte-level BPE tokenizer trained on the run's own training rows."""

    vocabulary_size: int = key("Vocabulary size, special tokens included.", 4096, ge=300, le=1 << 22)


class TokenizerSection(NamedSection):
    """Where the tokenizer comes from; unset, the model's own."""

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
        "Names of the modules that get an adapter; `all-linear`: every linear layer but the head, and routed experts.",
        "all-linear",
    )
    experts: bool | None = key(
        "Adapt the matrices of routed experts; unset, where `target_modules` is `all-linear`. Without dropout.", None
    )
    router: bool = key("Adapt the router of a mixture of experts.", False)
    modules_to_save: Strings = key("Modules that are fully trained and saved with the adapter.", ())
    rslora: bool = key("Rank-stabilized scaling (Kalajdzievski, 2023, arXiv:2312.03732).", False)
    dora: bool = key("Weight-decomposed adapters (Liu et al., 2024, arXiv:2402.09353).", False)
    init: Literal["default", "gaussian", "pissa", "olora", "loftq"] = key(
        "Initialization: `default` and `gaussian` start as the identity; `pissa` (Meng et al., 2024, arXiv:2404.02948) "
        "and `olora` (Büyükakyüz, 2024, arXiv:2406.01775) move principal components of the weights into the adapters; "
        "`loftq` (Li et al., 2023, arXiv:2310.08659) compensates for the quantization error.",
        "default",
    )
    layers: LayerNumbers = key("Indices of the layers that get adapters, from 0; unset, all.", ())
    rank_pattern: dict[str, Width] = key("Rank of modules by the end of their name: `{q_proj: 32}`.", {})
    alpha_pattern: dict[str, Shift] = key("Alpha of modules by the end of their name.", {})


class PeftSection(Section):
    """Another adapter of peft, with the arguments of its config; their properties: docs/how-to/adapters.md."""

    type: Annotated[Name, AfterValidator(str.lower)] = key(
        f"Its type, by peft's name: {', '.join(f'`{name}`' for name in trainable_types())} are proven; others run on "
        "one process and under DDP."
    )
    values: dict[str, Any] = key(
        "Arguments of its config class: `{r: 8, alpha: 16, target_modules: [q_proj, v_proj]}` for `loha`.", {}
    )


class QuantizationSection(Section):
    """Quantization of the frozen base (QLoRA: Dettmers et al., 2023, arXiv:2305.14314)."""

    method: Literal["bitsandbytes", "torchao"] = key(
        "The library (extra `quantization`; or `torchao`, 8 bits only).", "bitsandbytes"
    )
    bits: Literal[4, 8] = key("Bits per weight.", 4)
    kind: Literal["nf4", "fp4"] = key("bitsandbytes, 4 bits: NormalFloat or float.", "nf4")
    double: bool = key("bitsandbytes, 4 bits: quantize the scales, too.", True)
    compute_dtype: DType = key("Dtype of the matrix products.", "bfloat16")


class NewTokensSection(Section):
    """Tokens that are added to tokenizer and model before training."""

    tokens: Strings = key("Ordinary tokens.", ())
    special: Strings = key("Special tokens, such as `<|tool|>`.", ())
    init: Literal["mean", "pieces", "random"] = key(
        "Their initial embeddings: the mean of all, the mean of the token's former pieces, or random.",
        "mean",
    )


class ImageProcessorSection(NamedSection):
    """How images are resized and normalized for a model that is built `from_config` and has no image processor."""

    name: NameOrPath | None = key("Hub name or folder of an image processor, in place of the values.", None)
    size: Pixels = key("Height and width in pixels.", 224)
    mean: Shifts = key("Mean of each channel, to be subtracted.", (0.5, 0.5, 0.5), min_length=1, max_length=4)
    std: Scales = key("Standard deviation of each channel, to divide by.", (0.5, 0.5, 0.5), min_length=1, max_length=4)


class RopeScalingSection(Section):
    """More positions for a model with rotary position embeddings; written into its config, and so into the export."""

    rope_type: Literal["yarn", "linear"] = key(
        "`yarn` (Peng et al., 2023, arXiv:2309.00071), or `linear`: positions are divided by the factor. Other types "
        "and their values: `rope_scaling` in `model.config`."
    )
    factor: float = key("How many times as many positions as in pre-training.", gt=1, le=4096)
    original_max_position_embeddings: Length | None = key(
        "Positions of pre-training; unset, those in the model's config.", None
    )


ADAPTER_KEYS = ("lora", "peft", "adapter")
"""Keys of `model` that train adapters instead of the model's own weights."""


class ModelSection(NamedSection):
    """Which weights to start from, their dtype and attention, adapters, and which parameters are trained."""

    name: NameOrPath | None = key(
        "Hub name, or a folder when it begins with `.`, `/` or `~`. Exactly one of `name` and `from_config`.", None
    )
    revision: Name | None = key("Branch, tag or commit on the hub.", None)
    config: dict[str, Any] = key(
        "Values in the place of those in the config of `name`, such as `{attention_dropout: 0.1}` or "
        "`{rope_scaling: {rope_type: yarn, factor: 4.0}}`. None that changes the shapes of weights.",
        {},
    )
    rope_scaling: RopeScalingSection | None = key(
        "More positions than in pre-training, by scaling the rotary position embedding; also sets "
        "`max_position_embeddings`.",
        None,
    )
    from_config: FromConfigSection | None = key(
        "Build the model from its config with random weights drawn from `run.seed`.", None
    )
    tokenizer: TokenizerSection | None = key(
        "A tokenizer other than the model's own; required with `from_config`.", None
    )
    trust_remote_code: bool = key("Run Python code that comes with a hub model.", False)
    dtype: WeightDType = key(
        "Dtype of the weights. `auto`: `bfloat16` for the frozen base of LoRA with `train.precision: bf16`, which "
        "multiplies in it anyway; else `float32`, which keeps master weights.",
        "auto",
    )
    attention: Annotated[str, OneOf(ATTENTIONS)] = key(
        "Attention implementation; `auto`: our `per_sample` where the model is known to support it, else "
        "transformers' default.",
        "auto",
    )
    gradient_checkpointing: GradientCheckpointing = key(
        "Recompute activations in the backward pass. `true`: of every layer (least memory, about a third more time); a "
        "number n: of every n-th layer; `selective`: all but the results of matrix products and attention (Korthikanti "
        "et al., 2022, arXiv:2205.05198).",
        False,
    )
    activation_offload: bool = key(
        "Offload activations to host memory between forward and backward pass. Needs a GPU.", False
    )
    kernels: Literal["auto", "liger", "none"] = key(
        "Fused kernels of `liger-kernel` (extra `kernels`) for RMSNorm, gated MLPs and rotary embeddings, in every "
        "layer that computes the same. `auto`: on CUDA, if it is installed and nothing is compiled; `liger`: "
        "required; `none`: never.",
        "auto",
    )
    compile: Literal["off", "regional", "full", "auto"] = key(
        "torch.compile. `regional`: each kind of layer once, which is quick; `full`: the whole body, which takes "
        "minutes for a large model; `auto`: `regional` on a GPU where the run is long enough to save twice the time "
        "that compiling takes, as estimated, and `off` elsewhere. For GPUs; the first steps take longer.",
        "off",
    )
    batch_norm: BatchNorm | None = key(
        "`frozen`: batch norms keep their running statistics, as is usual in fine-tuning and the default for "
        "pre-trained weights. A number: they normalize over that many consecutive samples of the step (Hoffer et "
        "al., 2017, arXiv:1705.08741), independent of processes and microbatches. Required for a new model with "
        "batch norms.",
        None,
    )
    freeze: Strings = key("Patterns (`fnmatch`, such as `model.embed_tokens.*`) of frozen parameters.", ())
    train_only: Strings = key(
        "Patterns of the only trained parameters, such as `*embed_tokens*` or `lm_head.*`. Instead of `freeze`.", ()
    )
    lora: LoraSection | None = key(
        "Train LoRA adapters instead of the model's own weights. At most one kind of adapter.", None
    )
    peft: PeftSection | None = key("Another adapter of peft, such as IA3, OFT, LoHa or prompt tuning.", None)
    adapter: Path | None = key(
        "Continue training the adapter in this folder, whose config says which kind it is.", None
    )
    quantization: QuantizationSection | None = key("Quantize the frozen base.", None)
    new_tokens: NewTokensSection | None = key("Tokens to add to tokenizer and model.", None)
    image_processor: ImageProcessorSection | None = key(
        "How images are resized and normalized; unset, by the model's own processor.", None
    )
    cache_folder: Path | None = key("Cache of hub downloads; unset, the hub's default.", None)

    @property
    def trains_prompt(self) -> bool:
        """Return whether a new adapter prepends learned tokens or keys to the text."""
        return self.peft is not None and is_prompt_type(self.peft.type)

    @property
    def config_changes(self) -> dict[str, Any]:
        """Return the job's values that replace those in the config of pre-trained weights."""
        scaling = self.rope_scaling
        return {**self.config, **({} if scaling is None else {"rope_scaling": scaling.model_dump(exclude_none=True)})}
