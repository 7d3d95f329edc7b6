"""The inputs of a plan: the job's shapes, its batch, and its numbers of tokens and steps."""

from dataclasses import dataclass

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.train import TrainSection
from finetune.data.token_cache.cache import NotPrepared
from finetune.errors import FinetuneError
from finetune.memory.state import Method, method_of
from finetune.model.activations import CheckpointingMode
from finetune.model.kernels.float8 import casts_frozen_weights
from finetune.model.size import Shapes
from finetune.registry.model_choices import ARITHMETIC
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_run_plan, make_training_data


@dataclass(frozen=True)
class DataCounts:
    """The amount of training data; None if it is unknown until the data is prepared.

    A position is a unit of `train.global_batch_size`: a sample, a pack or a batch by tokens.
    """

    tokens_per_position: float
    num_steps: int | None
    is_measured: bool
    sentence: str


@dataclass(frozen=True)
class PlannedJob:
    """A job as the cost model sees it."""

    config: RunConfig
    shapes: Shapes | None
    counts: DataCounts

    @property
    def train(self) -> TrainSection:
        """Return the section `train`."""
        return self.config.train

    @property
    def method(self) -> Method:
        """Return the training method: all weights, or adapters on a frozen base, which may be quantized."""
        return method_of(self.config)

    @property
    def checkpointing(self) -> CheckpointingMode:
        """Return the activations that the job recomputes."""
        return self.config.model.gradient_checkpointing

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of a step."""
        return self.train.global_batch_size * self.counts.tokens_per_position

    @property
    def max_position_tokens(self) -> int:
        """Return the maximum number of tokens of a position: of a sample, or of a pack."""
        return _max_position_tokens(self.config)

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of an element in matrix products."""
        return ARITHMETIC[self.train.precision].item_bytes

    @property
    def is_autocast(self) -> bool:
        """Return whether autocast rounds float32 weights in each forward pass, unless the strategy stores others."""
        return self.config.model.dtype == "float32" and self.train.precision != "fp32"

    def fp8_share(self, flops_per_token: float, *, strategy: str) -> float:
        """Return the share of the FLOPs that 8 bits speed up: all but head and attention; 0 for another precision.

        If frozen weights are not cast once, torchao 0.18 computes their gradient, too: a quarter of the gain is left.
        """
        if self.train.precision != "fp8" or self.shapes is None:
            return 0.0
        shapes = self.shapes
        head = 6 * shapes.hidden * shapes.vocabulary
        attention = 12 * shapes.layers * shapes.queries * self.counts.tokens_per_position
        share = max(0.0, 1 - (head + attention) / flops_per_token)
        compiled = "off" if self.config.model.compile == "auto" else self.config.model.compile
        is_fast = self.method == "full" or casts_frozen_weights(self.train, strategy=strategy, compiled=compiled)
        return share if is_fast else share / 4

    def peak_dtype(self, *, has_tf32: bool) -> str:
        """Return the data type whose peak FLOP/s apply."""
        if self.train.precision != "fp32":
            return ARITHMETIC[self.train.precision].name  # fp8: that of head and attention
        return "tf32" if self.train.tf32 is not False and has_tf32 else "fp32"


def count_data(loaded: LoadedConfig) -> DataCounts:
    """Return the counts of the prepared data, else of the job file; nothing is tokenized.

    Raises DataError for unusable data.
    """
    config = loaded.config
    try:
        data = make_training_data(config, RunLog(is_main=False), locations=loaded.sources, builds=False)
    except NotPrepared:
        return _written_counts(config, reason="is not prepared")
    except FinetuneError as error:  # a dataset or tokenizer of the hub that cannot be reached from this machine
        return _written_counts(config, reason=f"cannot be read here ({str(error).splitlines()[0].rstrip('.')})")
    plan = make_run_plan(loaded, data)
    num_positions, epoch_tokens = plan.num_positions, data.training.epoch_tokens
    if not num_positions or not epoch_tokens:
        return _written_counts(config, reason="is a stream")
    tokens_per_position = epoch_tokens / num_positions
    unit = config.data.batching.unit
    sentence = f"The prepared data has {num_positions:,} {unit} with {tokens_per_position:,.0f} tokens each on average."
    return DataCounts(tokens_per_position, plan.num_steps, is_measured=True, sentence=sentence)


def _max_position_tokens(config: RunConfig) -> int:
    batching, longest = config.data.batching, config.data.max_length or 1
    return batching.tokens or longest if batching.by != "samples" else longest


def _written_counts(config: RunConfig, *, reason: str) -> DataCounts:
    """Return the counts of the job file: samples of maximum length, and steps if the budget is in steps or tokens."""
    train, tokens = config.train, _max_position_tokens(config)
    num_steps = train.steps
    if num_steps is None and train.tokens is not None:
        num_steps = max(1, -(-train.tokens // (train.global_batch_size * tokens)))
    unit = config.data.batching.unit
    sentence = f"The data {reason}: each of the {unit} counts as {tokens:,} tokens, its maximum length."
    if num_steps is None:
        sentence += " The number of steps of the epochs is unknown until `finetune prepare`."
    return DataCounts(float(tokens), num_steps, is_measured=False, sentence=sentence)
