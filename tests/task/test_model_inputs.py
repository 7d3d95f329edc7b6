"""Samples padded to a rectangle, or laid end to end: the same targets and the same loss."""

import numpy as np
import pytest
import torch

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.task.model_inputs import collate_padded, collate_padding_free, forward_logits
from finetune.task.protocol import TaskContext, build_task


def features(ids, targets, sample_id=0):
    is_target = np.array([place in targets for place in range(len(ids))])
    return Features({"input_ids": np.array(ids, np.uint32), "is_target": is_target}, sample_id)


SAMPLES = [features([5, 6, 7, 8], {2, 3}, 4), features([9, 10], {0, 1}, 2), features([11], {0}, 3)]


def test_packed_samples_restart_positions_and_have_no_label_across_samples():
    batch = collate_padding_free(SAMPLES)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0]]
    assert batch.labels.tolist() == [[IGNORED, 7, 8, IGNORED, 10, IGNORED, IGNORED]]
    assert set(batch.inputs) == {"input_ids", "position_ids"}
    assert batch.cumulative_lengths.tolist() == [0, 4, 6, 7]
    assert (batch.num_targets, batch.num_tokens, batch.sample_ids, batch.longest) == (3, 7, (4, 2, 3), 4)


@pytest.mark.parametrize(
    ("batching", "rows"), [({}, 3), ({"padding_free": True}, 1), ({"by": "packs"}, 1), ({"by": "tokens"}, 3)]
)
def test_the_batching_section_selects_packing_or_padding_with_the_same_loss(tokenizer, model, batching, rows):
    section = DataSection(
        train=TrainingSourceSection(path="/nowhere"), max_length=64, batching=BatchingSection(**batching)
    )
    task = build_task(TaskContext(TaskSection(name="pretrain"), section, tokenizer))
    batch = task.collate(SAMPLES)
    assert len(batch.labels) == rows
    alone = sum(task.loss_sums(model, collate_padded([each], pad_id=0))["loss_sum"].item() for each in SAMPLES[:2])
    assert task.loss_sums(model, batch)["loss_sum"].item() == pytest.approx(alone, rel=1e-5)
    assert task.metric_sums(model, batch)["loss_sum"].item() == pytest.approx(alone, rel=1e-5)


class Recording(torch.nn.Module):
    """A model that keeps what it is given."""

    def __init__(self, attention):
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": attention})()

    def forward(self, **given):
        self.given = given
        return type("Output", (), {"logits": torch.zeros(1, 1, 1)})()


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "flash_attention_3"])
def test_only_flash_attention_gets_sample_boundaries(attention):
    model = Recording(attention)
    forward_logits(torch.nn.DataParallel(model), collate_padding_free(SAMPLES))
    told = {name: value for name, value in model.given.items() if name not in ("input_ids", "position_ids")}
    if attention == "sdpa":
        assert told == {"use_cache": False}
    else:
        assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 4, 6, 7]
        assert told["cu_seq_lens_q"].dtype == torch.int32
        assert told["max_length_q"] == told["max_length_k"] == 4
