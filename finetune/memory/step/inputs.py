"""The task of a job and its largest microbatch, before there is data: rows as long as the job allows.

No text is encoded, so a tokenizer with a few words is enough.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.data.batch import Batch
from finetune.data.encoding.labelled_images import IMAGE, LABEL
from finetune.data.encoding.labelled_text import LABELS
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import ModelError
from finetune.model.processing import load_processing
from finetune.registry.tasks import TASKS, SampleContent
from finetune.runtime.optional import no_op
from finetune.task.build import build_task
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.preference.dpo import REFERENCE
from finetune.task.protocol import Task, TaskContext

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
    """Return the job's task; raises ModelError where rows are needed. `data` is the job's with `auto` resolved."""
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
    """Return a microbatch of the longest rows, every token a target; `is_one_sample`: as one sample of that length."""
    length = (data.batching.tokens or data.longest) if data.batching.by != "samples" else data.longest
    make = _FEATURES[TASKS[config.task.name].sample]
    if is_one_sample:
        num_samples, length = 1, num_samples * length
    return task.collate([make(config, number, length) for number in range(num_samples)])


def is_token_task(config: RunConfig) -> bool:
    """Return whether only attention separates the samples of a row."""
    return TASKS[config.task.name].may_be_packed


def _of_text(config: RunConfig, number: int, length: int) -> Features:
    return Features(_tokens(length), sample_id=number)


def _tokens(length: int) -> dict[str, np.ndarray]:
    is_target = np.ones(length, bool)
    return {"input_ids": np.full(length, 7, np.uint32), "is_target": is_target, "is_word_start": is_target}


def _of_classes(config: RunConfig, number: int, length: int) -> Features:
    kind = config.task.classification.kind
    num = max(1, len(config.task.classification.labels)) if kind == "regression" else 2
    label = np.zeros(1, np.int64) if kind == "single_label" else np.zeros(num, np.float32)
    return Features({"input_ids": _tokens(length)["input_ids"], LABELS: label}, sample_id=number)


def _of_tags(config: RunConfig, number: int, length: int) -> Features:
    arrays = {name: each for name, each in _tokens(length).items() if name != "is_word_start"}
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
