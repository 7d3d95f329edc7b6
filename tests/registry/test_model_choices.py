from typing import get_args

import torch

from finetune.config.sections.train import TrainSection
from finetune.registry.model_choices import ARITHMETIC


def test_every_precision_of_a_job_names_a_dtype_of_torch_and_a_mixed_precision_of_accelerate() -> None:
    assert set(ARITHMETIC) == set(get_args(TrainSection.model_fields["precision"].annotation))
    for arithmetic in ARITHMETIC.values():
        assert getattr(torch, arithmetic.dtype).itemsize == arithmetic.item_bytes
        assert arithmetic.mixed_precision in ("no", "bf16", "fp16")
