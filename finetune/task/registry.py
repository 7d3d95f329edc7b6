"""The tasks by name."""

from collections.abc import Callable, Mapping
from typing import Literal

from finetune.config.sections.task import TaskName
from finetune.task.causal_lm import PretrainTask, SftTask
from finetune.task.classification.image_classification import ImageClassificationTask
from finetune.task.classification.text_classification import TextClassificationTask
from finetune.task.classification.token_classification import TokenClassificationTask
from finetune.task.distillation import DistillationTask
from finetune.task.embedding.embedding import EmbeddingTask
from finetune.task.embedding.reranking import RerankingTask
from finetune.task.masked_lm import MaskedLmTask
from finetune.task.preference.dpo import PreferenceTask
from finetune.task.preference.kto import KtoTask
from finetune.task.preference.reward import RewardTask
from finetune.task.protocol import ModelHead, Task, TaskContext
from finetune.task.seq2seq import Seq2SeqTask
from finetune.task.vision_language_sft import VisionLanguageSftTask

InputKind = Literal["text", "images", "both"]


def _preference(context: TaskContext) -> Task:
    """Return the task of the loss: KTO's answers are judged one by one."""
    return KtoTask(context) if context.section.preference.loss == "kto" else PreferenceTask(context)


TASKS: dict[str, Callable[[TaskContext], Task]] = {
    "sft": SftTask,
    "text_classification": TextClassificationTask,
    "token_classification": TokenClassificationTask,
    "pretrain": PretrainTask,
    "distillation": DistillationTask,
    "masked_lm": MaskedLmTask,
    "seq2seq": Seq2SeqTask,
    "preference": _preference,
    "reward": RewardTask,
    "image_classification": ImageClassificationTask,
    "vision_language_sft": VisionLanguageSftTask,
    "embedding": EmbeddingTask,
    "reranking": RerankingTask,
}

INPUT_KINDS: Mapping[TaskName, InputKind] = {"image_classification": "images", "vision_language_sft": "both"}
"""What the rows of a task hold; text for all others."""


def build_task(context: TaskContext) -> Task:
    """Return the task of that name; raises DataError when the tokenizer or the rows cannot serve it."""
    return TASKS[context.section.name](context)


def model_head(name: TaskName) -> ModelHead:
    """Return the head of the model that the task trains."""
    head: ModelHead = getattr(TASKS[name], "head", "causal_lm")  # both tasks of preference have that of a causal model
    return head


def input_kind(name: TaskName) -> InputKind:
    """Return what the rows of the task hold."""
    return INPUT_KINDS.get(name, "text")
