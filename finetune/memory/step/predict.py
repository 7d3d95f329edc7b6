"""The memory and the FLOPs of a job's step under any strategy, without loading any weights.

The job's own step runs on fake tensors with a few of the model's layers, since memory and FLOPs are linear in their
number. FSDP2 runs in a fake process group. DeepSpeed's engine cannot run on fake tensors: for ZeRO, its buffers and
gathered weights are added to the memory of the same step. The batch has rows of the maximum length; nothing is encoded,
so a tokenizer with a few words is enough.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.data.batch import Batch
from finetune.data.encoding.labelled import IMAGE, LABEL, LABELS
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import FinetuneError, ModelError
from finetune.memory.state import Layout, Prediction
from finetune.memory.step.fake_model import (
    FUSED_FUNCTIONS,
    empty_model,
    make_trainable,
    runs_fused_layers,
    with_method,
)
from finetune.memory.step.trace import (
    BETWEEN,
    Sharding,
    SymbolicStep,
    Values,
    tensor_parallel_parts,
    trace_step,
    traced_parts,
    zero_parts,
)
from finetune.model.kernels.fused_layers import fuse_layers
from finetune.model.layers import (
    KeptLayers,
    can_be_extrapolated,
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
from finetune.task.preference.dpo import REFERENCE
from finetune.task.protocol import Task, TaskContext, build_task

CONTEXT_BYTES = 600 << 20
"""Memory of a CUDA context, its kernels and cuBLAS's workspace, outside torch's allocator."""

NCCL_BYTES = 400 << 20
"""Memory of NCCL's buffers and channels with several ranks, outside torch's allocator."""

Key = tuple[Any, ...]


class Predictor:
    """Predicts a job's step under many layouts, with cached traces."""

    def __init__(self, config: RunConfig, data: DataSection) -> None:
        """Raise ModelError if the job cannot be predicted; `data` is the job's with `auto` resolved."""
        if config.model.activation_offload:
            raise ModelError("model.activation_offload: the activations that stay on the device cannot be predicted.")
        self._config = config
        self._task, self._data = symbolic_task(config, data), data
        self._models: dict[Key, Any] = {}
        self._steps: dict[Key, SymbolicStep] = {}

    def predict(self, layout: Layout) -> Prediction:
        """Return the memory of one rank under this layout; raises ModelError."""
        sharding, precision = _sharding(layout), self._config.train.precision
        step = self._step(layout, sharding if precision != "fp32" or sharding.is_sharded else Sharding())
        is_zero = layout.strategy.startswith("zero")
        parts = zero_parts(self._config, layout, step) if is_zero else traced_parts(layout, step)
        if layout.tensor_size > 1:
            parts = tensor_parallel_parts(parts, layout, read_shapes(step.config))
        parts |= self._outside_step(layout, num_trained=step.values["num_trained",])
        rounded = {name: round(size) for name, size in parts.items() if round(size)}
        flops = step.flops_per_token
        return Prediction(
            peak_bytes=sum(rounded.values()),
            parts=rounded,
            flops_per_token=flops["forward"] + flops["backward"],
            recomputed_flops_per_token=flops["recomputation"],
            attention_flops_per_token=step.attention_flops_per_token,
            num_parameters=round(step.values["num_parameters",]),
            num_trained=round(step.values["num_trained",]),
            num_adapted_features=round(step.values["num_adapted_features",]),
        )

    def _outside_step(self, layout: Layout, *, num_trained: float) -> dict[str, float]:
        """Return memory that is used outside the step: libraries on a GPU, checkpoints being written on a CPU."""
        if layout.device == "cuda":
            return {"libraries": CONTEXT_BYTES + (NCCL_BYTES if layout.num_ranks > 1 else 0)}
        optimizer = self._config.train.optimizer
        if not self._config.checkpoint.asynchronous:
            return {}
        trained = 4 * round(num_trained)
        state = optimizer_state_bytes(
            optimizer.name, optimizer.state_dtype, num_trained=round(num_trained), trained_bytes=trained
        )
        return {"checkpoint copies": (trained + state) / layout.num_ranks}

    def _step(self, layout: Layout, sharding: Sharding) -> SymbolicStep:
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

    def _trace(self, layout: Layout, sharding: Sharding) -> SymbolicStep:
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
        batch = largest_batch(
            self._config, self._task, data=self._data, num_samples=layout.microbatch_size, is_one_sample=is_merged
        )

        def trace(layers_of: KeptLayers) -> Values:
            model = make_trainable(with_layers(whole, layers_of), section, task=self._task, seed=self._config.run.seed)
            if runs_fused_layers(section, device=layout.device):
                fuse_layers(unwrap_model(model), fuses_rotary=False, stand_ins=FUSED_FUNCTIONS)
            layers = [layer for name in layers_of for layer in _layers(model, name)]
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
        return SymbolicStep(_extrapolated(whole, trace), tokens_of(batch), num_merged, unwrap_model(whole).config)


def _layers(model: Any, name: str) -> Sequence[nn.Module]:
    return list(unwrap_model(model).get_submodule(name).children())


def _extrapolated(model: Any, trace: Callable[[KeptLayers], Values]) -> Values:
    """Return the values of the whole model, from traces of a few layers of each type."""
    stacks = find_stacks(model, with_sizes=True)
    if not can_be_extrapolated(stacks):
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


def _sharding(layout: Layout) -> Sharding:
    """Return the sharding of parameters in the trace for this strategy."""
    if layout.strategy.startswith("zero"):
        return Sharding(is_half=True)
    if layout.strategy in ("fsdp2", "fsdp2_tensor_parallel"):
        return Sharding(num_shards=layout.num_groups)
    if layout.strategy == "hsdp":
        shards = min(layout.ranks_per_node, layout.num_ranks)
        return Sharding(num_shards=shards, num_copies=layout.num_ranks // shards)
    return Sharding()


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
    tokenizer = None if reads == "images" else _tokenizer()
    facts = {"labels": config.task.classification.labels or _CLASSES, "num_numbers": 1}
    return build_task(TaskContext(config.task, data, tokenizer, processor, facts=facts, loss_kernel=kernel))


def largest_batch(
    config: RunConfig, task: Task, *, data: DataSection, num_samples: int, is_one_sample: bool = False
) -> Batch:
    """Return a microbatch of the longest rows, every token a target; `is_one_sample`: as one sample of all rows."""
    length = (data.batching.tokens or data.longest) if data.batching.by != "samples" else data.longest
    make = _FEATURES[TASKS[config.task.name].sample]
    if is_one_sample:
        num_samples, length = 1, num_samples * length
    return task.collate([make(config, number, length) for number in range(num_samples)])


def _of_text(config: RunConfig, number: int, length: int) -> Features:
    return Features(_tokens(length), sample_id=number)


def _tokens(length: int) -> dict[str, np.ndarray]:
    is_target = np.ones(length, bool)
    return {"input_ids": np.full(length, 7, np.uint32), "is_target": is_target, "is_word_start": is_target}


def _of_classes(config: RunConfig, number: int, length: int) -> Features:
    problem_type = config.task.classification.kind
    num = max(1, len(config.task.classification.labels)) if problem_type == "regression" else 2
    label = np.zeros(1, np.int64) if problem_type == "single_label" else np.zeros(num, np.float32)
    return Features({"input_ids": _tokens(length)["input_ids"], LABELS: label}, sample_id=number)


def _of_tags(config: RunConfig, number: int, length: int) -> Features:
    arrays = {name: array for name, array in _tokens(length).items() if name != "is_word_start"}
    return Features({**arrays, LABELS: np.zeros(length, np.int64)}, sample_id=number)


def _of_pairs(config: RunConfig, number: int, length: int) -> Features:
    lengths = np.array([length, length], np.uint32)
    arrays = {**_tokens(2 * length), LENGTHS_OF_SEQUENCES: lengths, REFERENCE: np.zeros(2, np.float32)}
    return Features(arrays, sample_id=number)


def _of_source_and_target(config: RunConfig, number: int, length: int) -> Features:
    arrays = _tokens(length + (config.task.seq2seq.max_target_length or length))
    arrays["is_target"] = np.arange(len(arrays["input_ids"])) >= length
    return Features(arrays, sample_id=number)


def _of_images(config: RunConfig, number: int, length: int) -> Features:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "PNG")
    image = np.frombuffer(buffer.getvalue(), np.uint8)
    return Features({IMAGE: image, LABEL: np.zeros(1, np.int64)}, sample_id=number)


_FEATURES: Mapping[SampleContent, Callable[[RunConfig, int, int], Features]] = {
    "tokens": _of_text,
    "tokens_and_label": _of_classes,
    "tokens_and_tags": _of_tags,
    "texts": _of_pairs,
    "source_and_target": _of_source_and_target,
    "image": _of_images,
}


def _tokenizer() -> Any:
    words = [*_WORDS.values(), *(f"word{number}" for number in range(8))]
    model: Any = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=_WORDS["unk"]))
    named = {f"{name}_token": word for name, word in _WORDS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=_TEMPLATE, **named)


def tokens_of(batch: Batch) -> int:
    """Return the number of positions in the batch's rows, padding included; for images, their number."""
    rows, length = batch.positions
    return rows * length
