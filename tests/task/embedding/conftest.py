"""Small models whose states are read, and rows with duplicates."""

import copy

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from finetune.config.sections.task import EmbeddingSection, RerankingSection, TaskSection
from finetune.task.embedding.embedding import EmbeddingTask, RerankingTask
from finetune.task.protocol import TaskContext
from tests.small_models import SMALL

SIZES = {**SMALL, "vocab_size": 320, "initializer_range": 0.3}

ROWS = [
    {"anchor": "two and two", "positive": "four", "negatives": ["five"]},
    {"anchor": "two and one", "positive": "three", "negatives": []},
    {"anchor": "two and two", "positive": "is four", "negatives": ["three", "six"]},
    {"anchor": "What is four?", "positive": "four", "negatives": []},
    {"anchor": "and", "positive": "or is it two", "negatives": ["is four"]},
    {"anchor": "is two", "positive": "two", "negatives": []},
    {"anchor": "What", "positive": "that", "negatives": []},
    {"anchor": "four and four", "positive": "eight", "negatives": ["two"]},
]
SCORED = [
    {"text": text, "text_pair": pair, "score": score}
    for text, pair, score in (
        *(("two", "two and two", 0.9), ("four", "is four", 0.75), ("What", "two", 0.0), ("and", "or", 0.5)),
        *(("one", "two", 0.5), ("is", "four and", 0.1), ("is two", "two", 0.9), ("four", "eight", 0.3)),
    )
]


@pytest.fixture
def tokenizer(tokenizer):
    """A copy: a task may have it end texts with end-of-sequence."""
    made = copy.deepcopy(tokenizer)
    made.init_kwargs = dict(tokenizer.init_kwargs)
    return made


@pytest.fixture(scope="package")
def encoder():
    torch.manual_seed(0)
    config = BertConfig(**SIZES, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertModel(config, add_pooling_layer=False)


@pytest.fixture(scope="package")
def decoder():
    torch.manual_seed(1)
    return LlamaModel(LlamaConfig(**SIZES))


@pytest.fixture
def embedding(tokenizer, data):
    """Return a function that makes the task."""

    def make(**section):
        chosen = TaskSection(name="embedding", embedding=EmbeddingSection(**section))
        return EmbeddingTask(TaskContext(chosen, data, tokenizer))

    return make


@pytest.fixture
def reranking(tokenizer, data):
    def make(**section):
        chosen = TaskSection(name="reranking", reranking=RerankingSection(**section))
        return RerankingTask(TaskContext(chosen, data, tokenizer))

    return make
