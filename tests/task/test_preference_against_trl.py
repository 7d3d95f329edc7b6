"""Losses of whole batches equal those of TRL's own code, on the same model and the same batch, within 1e-6.

TRL's trainers are made without their constructors, which want data sets and folders: what computes the loss is theirs.
Where TRL's depends on the cut of the batch (a cross-entropy averaged over the microbatch's tokens), the answers here
have one length, so that both mean the same.
"""

import copy
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.encoding.preference import IS_GOOD, MARGIN
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.task.answer_pairs import sequence_log_probabilities
from finetune.task.preference import REFERENCE
from finetune.task.protocol import TaskContext, build_task
from tests.small_models import SMALL

pytest.importorskip("trl", reason="TRL is a package for tests")
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

BETA, PAD, SIZE = 0.3, 0, 64
PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
ONE_LENGTH = (([20, 21, 22], [30]), ([23, 24, 25], [31, 32, 33, 34, 35]), ([26, 27, 28], [36, 37]))
LENGTHS = (([20, 21, 22, 41], [30]), ([23], [31, 32, 33, 34, 35]), ([26, 27], [36, 37]))
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")


@pytest.fixture(scope="module")
def models():
    """Return a model and its reference, which is another one."""
    config = LlamaConfig(**SMALL, vocab_size=SIZE, num_key_value_heads=2, initializer_range=0.3, pad_token_id=PAD)
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    for model in made:
        add_fused_lm_head(model, outputs=FIELDS)
    return made


def task_of(tokenizer, name="preference", **section):
    data = DataSection(train=TrainingSourceSection(path="/nowhere/rows.jsonl"), max_length=64)
    kind = {"preference": "preference", "reward": "reward"}[name]
    task = build_task(TaskContext(TaskSection.model_validate({"name": name, kind: section}), data, tokenizer))
    task.pad_id = PAD
    return task


def sequence(prompt: list[int], answer: list[int]) -> Features:
    is_target = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Features({"input_ids": np.array([*prompt, *answer], np.uint32), "is_target": is_target})


def sample(prompt: list[int], *answers: list[int], sample_id: int = 0, **more: np.ndarray) -> Features:
    parts = [sequence(prompt, answer) for answer in answers]
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in ("input_ids", "is_target")}
    lengths = np.array([part.length for part in parts], np.int32)
    return Features({**arrays, LENGTHS_OF_SEQUENCES: lengths, **more}, sample_id)


def pairs(answers=LENGTHS) -> list[Features]:
    return [
        sample(prompt, *both, sample_id=place)
        for place, (prompt, both) in enumerate(zip(PROMPTS, answers, strict=True))
    ]


def known(features: list[Features], task, reference) -> list[Features]:
    """Return the samples with what the reference says of them, as a run works it out."""
    arrays = task.precomputed.compute(reference, task.collate(features))
    told = zip(features, arrays, strict=True)
    return [Features({**each.arrays, **more}, each.sample_id) for each, more in told]


def ours(task, model, features: list[Features]) -> float:
    with torch.no_grad():
        batch = task.collate(features)
        return (task.loss_sums(model, batch)["loss_sum"] / batch.num_targets).item()


def trainer_of(kind, model, reference=None, **attributes):
    """Return one of TRL's trainers with what its loss reads."""
    trainer = object.__new__(kind)
    same = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        unwrap_model=lambda value: value,
    )
    common = {
        "model": model,
        "ref_model": reference,
        "accelerator": same,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        "beta": BETA,
        "label_smoothing": 0.0,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "is_encoder_decoder": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    for name, value in (common | attributes).items():
        setattr(trainer, name, value)
    return trainer


def theirs(features: list[Features], *places: int) -> dict[str, torch.Tensor]:
    """Return TRL's batch of these sequences of each sample: all of the first place, then all of the next."""
    split = [_parts(each) for each in features]
    rows = [parts[place] for place in places for parts in split]
    longest = max(len(ids) for ids, _ in rows)
    batch = {"input_ids": torch.full((len(rows), longest), PAD)}
    batch |= {name: torch.zeros(len(rows), longest, dtype=torch.long) for name in ("attention_mask", "completion_mask")}
    for row, (ids, is_target) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        batch["attention_mask"][row, : len(ids)] = 1
        batch["completion_mask"][row, : len(ids)] = torch.from_numpy(is_target.astype(np.int64))
    return batch


def _parts(features: Features) -> list[tuple[np.ndarray, np.ndarray]]:
    ends = np.cumsum(features.arrays[LENGTHS_OF_SEQUENCES])[:-1]
    return list(
        zip(np.split(features.arrays["input_ids"], ends), np.split(features.arrays["is_target"], ends), strict=True)
    )


def sides(features: list[Features]) -> dict[str, torch.Tensor]:
    """Return the batch as TRL's trainers of pairs without a reference take it."""
    made = {}
    for side, place in (("chosen", 0), ("rejected", 1)):
        batch = theirs(features, place)
        made[f"{side}_input_ids"], made[f"{side}_attention_mask"] = batch["input_ids"], batch["attention_mask"]
        made[f"{side}_labels"] = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    return made


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ({"loss": "sigmoid"}, {"loss_types": ["sigmoid"], "loss_weights": [1.0]}),
        ({"loss": "hinge"}, {"loss_types": ["hinge"], "loss_weights": [1.0]}),
        ({"loss": "ipo"}, {"loss_types": ["ipo"], "loss_weights": [1.0]}),
        ({"loss": "apo_zero"}, {"loss_types": ["apo_zero"], "loss_weights": [1.0]}),
        (
            {"loss": "robust", "label_smoothing": 0.2},
            {"loss_types": ["robust"], "loss_weights": [1.0], "label_smoothing": 0.2},
        ),
        ({"loss": "sigmoid", "sft_weight": 0.5}, {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "loss" in value else "",
)
def test_dpo_is_that_of_trl(models, tokenizer, section, settings):
    model, reference = models
    task = task_of(tokenizer, beta=BETA, **section)
    features = known(pairs(ONE_LENGTH if "sft_weight" in section else LENGTHS), task, reference)
    more = {"f_divergence_type": "reverse_kl", "ld_alpha": None, "use_weighting": False}
    trainer = trainer_of(DPOTrainer, model, reference, **more, **settings)
    with torch.no_grad():
        loss = trainer._compute_loss(model, theirs(features, 0, 1), return_outputs=False)
    assert ours(task, model, features) == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)


def test_conservative_dpo_is_that_of_trl(models, tokenizer):
    """TRL's DPO smooths no labels any more (1.0 on); its CPO still has the formula, given ratios in place of values."""
    model, reference = models
    task = task_of(tokenizer, loss="sigmoid", beta=BETA, label_smoothing=0.1)
    features = known(pairs(), task, reference)
    batch = task.collate(features)
    with torch.no_grad():
        ratios = sequence_log_probabilities(model, batch) - batch.extras[REFERENCE]
        trainer = trainer_of(CPOTrainer, model, alpha=0.0, loss_type="sigmoid", label_smoothing=0.1)
        loss = trainer.cpo_loss(*ratios.chunk(2))[0].mean()
    assert ours(task, model, features) == pytest.approx(loss.item(), abs=1e-6)


def test_orpo_is_that_of_trl(models, tokenizer):
    """But for the cross-entropy: TRL's is over the prompt too (as the authors' code), ours, as the paper's, is not."""
    model, _ = models
    task, features = task_of(tokenizer, loss="orpo", beta=BETA), pairs()
    trainer = trainer_of(ORPOTrainer, model, padding_value=PAD)
    with torch.no_grad():
        chosen, rejected, *_ = trainer.concatenated_forward(model, sides(features))
        preferring = -trainer.odds_ratio_loss(chosen, rejected)[0]
    loss = (preferring - chosen).mean()
    assert ours(task, model, features) == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("section", "settings", "answers"),
    [
        ({"loss": "simpo", "target_margin": 0.7}, {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0}, LENGTHS),
        ({"loss": "cpo", "sft_weight": 0}, {"loss_type": "sigmoid", "cpo_alpha": 0}, LENGTHS),
        ({"loss": "cpo"}, {"loss_type": "sigmoid", "cpo_alpha": 1.0}, ONE_LENGTH),
        (
            {"loss": "cpo", "label_smoothing": 0.1, "sft_weight": 0},
            {"loss_type": "sigmoid", "cpo_alpha": 0, "label_smoothing": 0.1},
            LENGTHS,
        ),
    ],
)
def test_cpo_and_simpo_are_those_of_trl(models, tokenizer, section, settings, answers):
    model, _ = models
    task, features = task_of(tokenizer, beta=BETA, **section), pairs(answers)
    trainer = trainer_of(CPOTrainer, model, pad_token_id=PAD, alpha=0.0, **settings)
    with torch.no_grad():
        loss, _ = trainer.get_batch_loss_metrics(model, sides(features))
    assert ours(task, model, features) == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("turned", [False, True])
def test_kto_is_that_of_trl_where_both_see_the_whole_batch(models, tokenizer, turned):
    """Once the model has moved so that the reference point is above zero, once so that it is held there."""
    model, reference = models[::-1] if turned else models
    section = {"loss": "kto", "beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    task = task_of(tokenizer, **section)
    good = (True, False, True)
    features = [
        sample(prompt, chosen, PROMPTS[place][:1] * 3, sample_id=place, **{IS_GOOD: np.array([good[place]])})
        for place, (prompt, (chosen, _)) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    features = known(features, task, reference)
    trainer = trainer_of(
        KTOTrainer, model, reference, loss_type="kto", calculate_KL=True, desirable_weight=1.3, undesirable_weight=0.7
    )
    batch = theirs(features, 0) | {f"KL_{name}": tensor for name, tensor in theirs(features, 1).items()}
    batch["label"] = torch.tensor(good)
    with torch.no_grad():
        loss = trainer._compute_loss(model, batch, return_outputs=False)
    assert (trainer._metrics["eval"]["kl"][0] > 0) == turned
    assert ours(task, model, features) == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("centering", [0.0, 0.05])
def test_a_reward_is_that_of_trl(models, tokenizer, centering):
    torch.manual_seed(1)
    config = copy.deepcopy(models[0].config)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config).eval()
    task = task_of(tokenizer, "reward", use_margin=True, centering=centering)
    margins = (0.5, 0.0, 1.25)
    features = [
        Features({**each.arrays, MARGIN: np.array([margin], np.float32)}, each.sample_id)
        for each, margin in zip(pairs(), margins, strict=True)
    ]
    arguments = SimpleNamespace(center_rewards_coefficient=centering or None)
    trainer = trainer_of(RewardTrainer, model, args=arguments)
    batch = theirs(features, 0, 1) | {"margin": torch.tensor(margins)}
    del batch["completion_mask"]
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch)
    assert ours(task, model, features) == pytest.approx(loss.item(), abs=1e-6)
