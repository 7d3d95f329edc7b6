"""The memory and the FLOPs of a job's step under any strategy, without loading any weights.

The job's own step runs on fake tensors with a few of the model's layers, since memory and FLOPs are linear in their
number. FSDP2 runs in a fake process group. DeepSpeed's engine cannot run on fake tensors: for ZeRO, its buffers and
gathered weights are added to the memory of the same step. The batch has rows of the maximum length; nothing is encoded,
so a tokenizer with a few words is enough.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.data.encoding.labelled import IMAGE, LABEL, LABELS
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import FinetuneError, ModelError
from finetune.memory.fake_model import (
    FUSED_FUNCTIONS,
    empty_model,
    make_fake_trainable,
    runs_fused_layers,
    with_method,
)
from finetune.memory.state import Prediction, TrainingLayout
from finetune.memory.trace import (
    BETWEEN,
    Sharding,
    SymbolicStep,
    Values,
    tensor_parallel_parts,
    trace_step,
    traced_parts,
    zero_parts,
)
from finetune.model.kernels.float8 import casts_frozen_weights
from finetune.model.kernels.fused_layers import fuse_layers
from finetune.model.layers import (
    KeptLayers,
    fewest_layers,
    find_stacks,
    with_layers,
    with_one_more,
)
from finetune.model.processing import load_processing
from finetune.model.size import optimizer_state_bytes, read_shapes
from finetune.registry.tasks import TASKS, SampleContent
from finetune.runtime.optional import no_op
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.model_inputs import is_padding_free, unwrap_model
from finetune.task.protocol import Task, TaskContext, build_task

CONTEXT_BYTES = 600 << 20
"""Memory of a CUDA context, its kernels and cuBLAS's workspace, outside torch's allocator."""

NCCL_BYTES = 400 << 20
"""Memory of NCCL's buffers and channels with several ranks, outside torch's allocator."""

MAX_KINDS = 6
"""The maximum number of kinds of layers of a model that is extrapolated from one layer of each."""

Key = tuple[Any, ...]


class MemoryPredictor:
    """Predicts a job's step under many layouts, with cached traces."""

    def __init__(self, config: RunConfig, data: DataSection) -> None:
        """Raise ModelError if the job cannot be predicted; `data` is the job's with `auto` resolved."""
        if config.model.activation_offload:
            raise ModelError("model.activation_offload: the activations that stay on the device cannot be predicted.")
        self._config = config
        self._task, self._data = symbolic_task(config, data), data
        self._models: dict[Key, Any] = {}
        self._steps: dict[Key, SymbolicStep] = {}

    def predict(self, layout: TrainingLayout) -> Prediction:
        """Return the memory of one rank under this layout; raises ModelError."""
        strategy, train = layout.strategy, self._config.train
        is_zero, sharding = strategy.startswith("zero"), Sharding()
        if is_zero and train.precision != "fp32":
            sharding = Sharding(is_half=True)
        elif strategy in ("fsdp2", "fsdp2_tensor_parallel"):
            sharding = Sharding(num_shards=layout.num_groups)
        elif strategy == "hsdp":
            shards = min(layout.ranks_per_node, layout.num_ranks)
            sharding = Sharding(num_shards=shards, num_copies=layout.num_ranks // shards)
        step = self._step(layout, sharding)
        parts = zero_parts(self._config, layout, step) if is_zero else traced_parts(layout, step)
        if layout.tensor_size > 1:
            parts = tensor_parallel_parts(parts, layout, read_shapes(step.config))
        compiled = "off" if self._config.model.compile == "auto" else self._config.model.compile
        if casts_frozen_weights(train, strategy=strategy, compiled=compiled):
            parts["8-bit copies of frozen weights"] = step.values["num_frozen_products",]
        # Outside the step there are libraries on a GPU, and checkpoints being written on a CPU.
        num_trained = round(step.values["num_trained",])
        if layout.device == "cuda":
            parts["libraries"] = CONTEXT_BYTES + (NCCL_BYTES if layout.num_ranks > 1 else 0)
        elif self._config.checkpoint.asynchronous:
            name, state_dtype = train.optimizer.name, train.optimizer.state_dtype
            state = optimizer_state_bytes(name, state_dtype, num_trained=num_trained, trained_bytes=4 * num_trained)
            parts["checkpoint copies"] = (4 * num_trained + state) / layout.num_ranks
        rounded = {name: round(size) for name, size in parts.items() if round(size)}
        flops = step.flops_per_token
        return Prediction(
            peak_bytes=sum(rounded.values()),
            parts=rounded,
            flops_per_token=flops["forward"] + flops["backward"],
            recomputed_flops_per_token=flops["recomputation"],
            attention_flops_per_token=step.attention_flops_per_token,
            num_parameters=round(step.values["num_parameters",]),
            num_trained=num_trained,
            num_adapted_features=round(step.values["num_adapted_features",]),
        )

    def _step(self, layout: TrainingLayout, sharding: Sharding) -> SymbolicStep:
        key = (layout.method, layout.gradient_checkpointing, layout.microbatch_size, layout.device, sharding)
        if key not in self._steps:
            try:
                self._steps[key] = self._trace(layout, sharding)
            except FinetuneError:
                raise
            except Exception as error:  # of an architecture that needs values
                raise ModelError(
                    f"the memory of this job cannot be predicted: {type(error).__name__}: {str(error).splitlines()[0]}"
                ) from error
        return self._steps[key]

    def _trace(self, layout: TrainingLayout, sharding: Sharding) -> SymbolicStep:
        section = with_method(self._config.model, layout.method, gradient_checkpointing=layout.gradient_checkpointing)
        key = (layout.method, layout.gradient_checkpointing)
        if key not in self._models:
            self._models[key] = empty_model(self._config, section, task=self._task)
        whole = self._models[key]
        is_merged = (
            layout.device == "cuda"
            and TASKS[self._config.task.name].may_be_packed
            and is_padding_free(self._data.batching)
        )
        # A microbatch of the longest rows, every token a target.
        batching = self._data.batching
        length = (batching.tokens or self._data.longest) if batching.by != "samples" else self._data.longest
        num_samples = layout.microbatch_size
        if is_merged:
            num_samples, length = 1, num_samples * length
        arrays = _arrays_of(self._config, TASKS[self._config.task.name].sample, length=length)
        if (precomputed := self._task.precomputed) is not None:
            arrays |= precomputed.example
        batch = self._task.collate([Features(arrays, sample_id=number) for number in range(num_samples)])

        def trace(layers_of: KeptLayers) -> Values:
            model = make_fake_trainable(
                with_layers(whole, layers_of), section, task=self._task, seed=self._config.run.seed
            )
            if runs_fused_layers(section, device=layout.device):
                fuse_layers(unwrap_model(model), fuses_rotary=False, stand_ins=FUSED_FUNCTIONS)
            layers = [layer for name in layers_of for layer in unwrap_model(model).get_submodule(name).children()]
            return trace_step(
                self._config,
                model,
                task=self._task,
                batch=batch,
                layers=layers,
                sharding=sharding,
                device=layout.device,
            )

        # several samples of a row were traced as one, whose attention costs this many times more
        num_merged = layout.microbatch_size if is_merged else 1
        rows, length = batch.positions
        return SymbolicStep(_extrapolated(whole, trace), rows * length, num_merged, unwrap_model(whole).config)


def _extrapolated(model: Any, trace: Callable[[KeptLayers], Values]) -> Values:
    """Return the values of the whole model, from traces of a few layers of each type."""
    stacks = find_stacks(model, with_sizes=True)
    if not 0 < sum(len(set(stack.kinds)) for stack in stacks) <= MAX_KINDS:
        return trace({stack.name: range(len(stack.kinds)) for stack in stacks})
    layers_of = fewest_layers(stacks)
    base: Mapping[Any, float] = trace(layers_of)
    totals: defaultdict[Any, float] = defaultdict(float, base)
    for number, more in with_one_more(stacks, layers_of):
        values = trace(more)
        for name in {*base, *values}:
            totals[name] += number * (values.get(name, 0.0) - base.get(name, 0.0))
    # Between the first and the last layer, a backward pass needs less than at one of them; small copies lack them.
    return {name: value for name, value in totals.items() if name[0] in ("held", "flops") or BETWEEN not in name}


_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_WORDS = {
    "unk": "[UNK]",
    "pad": "[PAD]",
    "bos": "[BOS]",
    "eos": "[EOS]",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}
_CLASSES = ("0", "1")


def symbolic_task(config: RunConfig, data: DataSection) -> Task:
    """Return the job's task; raises ModelError if it needs rows. `data` is the job's with `auto` resolved."""
    reads = TASKS[config.task.name].reads
    if reads == "both" or config.task.distillation is not None:
        raise ModelError(f"task.name: the memory of `{config.task.name}` cannot be predicted without its rows.")
    processor = None
    if reads == "images":
        processor = load_processing(
            config.model,
            reads=reads,
            texts=lambda: (),
            cache_folder=cache_folder(config.data),
            log=no_op,
            images=config.data.images,
        ).processor
    kernel, _ = resolve_kernel(config.train.loss_kernel)
    tokenizer = None
    if reads != "images":
        words = [*_WORDS.values(), *(f"word{number}" for number in range(8))]
        model: Any = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=_WORDS["unk"]))
        named = {f"{name}_token": word for name, word in _WORDS.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=_TEMPLATE, **named)
    facts = {"labels": config.task.classification.labels or _CLASSES, "num_numbers": 1}
    return build_task(TaskContext(config.task, data, tokenizer, processor, facts=facts, loss_kernel=kernel))


def _arrays_of(config: RunConfig, sample: SampleContent, *, length: int) -> dict[str, np.ndarray]:
    """Return the arrays of a sample of `length` tokens, all of them targets."""
    if sample == "image":
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64)).save(buffer, "PNG")
        return {IMAGE: np.frombuffer(buffer.getvalue(), np.uint8), LABEL: np.zeros(1, np.int64)}
    num_tokens = length
    if sample == "texts":  # a pair
        num_tokens = 2 * length
    elif sample == "source_and_target":
        num_tokens = length + (config.task.seq2seq.max_target_length or length)
    ids, is_target = np.full(num_tokens, 7, np.uint32), np.ones(num_tokens, bool)
    if sample == "tokens_and_label":
        problem_type = config.task.classification.kind
        num = max(1, len(config.task.classification.labels)) if problem_type == "regression" else 2
        return {
            "input_ids": ids,
            LABELS: np.zeros(1, np.int64) if problem_type == "single_label" else np.zeros(num, np.float32),
        }
    if sample == "tokens_and_tags":
        return {"input_ids": ids, "is_target": is_target, LABELS: np.zeros(length, np.int64)}
    arrays = {"input_ids": ids, "is_target": is_target, "is_word_start": is_target}
    if sample == "texts":
        arrays[LENGTHS_OF_SEQUENCES] = np.array([length, length], np.uint32)
    elif sample == "source_and_target":
        arrays["is_target"] = np.arange(num_tokens) >= length
    return arrays
