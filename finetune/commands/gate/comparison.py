"""The comparison of a tuned model with its base or another model on the same rows."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.evaluate import EvaluationSetup, EvaluationTarget, find_evaluation_target
from finetune.commands.export import processing_in
from finetune.commands.gate.differences import PairedDifference, loss_difference, share_difference
from finetune.commands.gate.general import GENERAL_ROWS, Forgetting, GeneralRows, read_general
from finetune.commands.gate.rows import measure_rows
from finetune.config.load import RESOLVED_NAME
from finetune.data.features import Features
from finetune.data.token_cache.cache import prepare_set
from finetune.errors import DataError, UserError
from finetune.model.frozen_models import reference_mode
from finetune.model.loading.architecture import NEW_HEADS
from finetune.registry.losses import RERANKING_LOSSES
from finetune.registry.tasks import TASKS
from finetune.run.setup.training_data import make_encoding
from finetune.run.state.run_folder import RunInputs
from finetune.runtime.optional import no_op


@dataclass(frozen=True)
class ComparedRow:
    """What both models reach on a row; its text is that before its only or last answer, which is the reference."""

    location: str
    text: str
    reference: str
    num_targets: int
    baseline_loss: float  # per target
    tuned_loss: float
    baseline_is_right: bool
    tuned_is_right: bool

    @property
    def gain(self) -> float:
        """Return by how much the tuned model is better."""
        return self.baseline_loss - self.tuned_loss


@dataclass(frozen=True)
class Comparison:
    """What two models reach on the same rows."""

    loss: PairedDifference
    share: PairedDifference | None  # of right rows
    share_name: str
    rows: Sequence[ComparedRow]  # what got worse most comes first, what got better most last
    forgetting: Forgetting | None  # None without general rows
    seen_differently: Sequence[str]  # sentences about rows that a model has seen otherwise in its training
    may_have_new_head: bool  # the baseline is the base, and this head is usually not among its weights


@dataclass(frozen=True)
class ComparedModels:
    """Both models; one is loaded at a time."""

    setup: EvaluationSetup  # of the tuned model; both are measured with its task, on its rows
    tuned: EvaluationTarget
    baseline: EvaluationTarget
    is_base: bool  # the baseline is the model as the tuned one's run began with it

    @contextmanager
    def loaded(self, target: EvaluationTarget) -> Iterator[Any]:
        """Yield one of them; the base is without the adapters that a run has added to it. Collective."""
        self.setup.accelerator.free_memory()  # it has a reference to every model that it has prepared
        gc.collect()
        is_base = self.is_base and target is self.baseline
        model = self.setup.load_initial(target)
        model = model if is_base else target.load_weights(model)
        model = self.setup.accelerator.prepare_model(model, evaluation_mode=True)
        with reference_mode(model, target.origin.model) if is_base else nullcontext():
            yield model


def compare_models(models: ComparedModels, *, general_rows: Path | None, trust_remote_code: bool) -> Comparison:
    """Return the comparison on the tuned model's validation rows, and on general rows where the model continues texts.

    General rows come from the file, or else from the package, unless the job trains a model from random weights.
    Raises UserError if a model reads other tokens, or the loss is not a sum over rows. Collective.
    """
    seen_differently = find_other_encodings(models, trust_remote_code=trust_remote_code)
    setup, forgetting = models.setup, None
    if setup.task.precomputed is not None:  # the loss needs a reference, which is the model that the job starts from
        setup = setup.with_frozen_outputs(setup.load_initial(replace(models.tuned, saved=None)))
    samples = [setup.rows.intact(index) for index in range(len(setup.rows))]
    with models.loaded(models.baseline) as model:
        baseline = measure_rows(model, setup.task, samples)
        general = _general_rows(models, general_rows, model)
        general_baseline = None if general is None else general.measure(model)
    del model
    with models.loaded(models.tuned) as model:
        tuned = measure_rows(model, setup.task, samples)
        if general is not None and general_baseline is not None:
            general_tuned = general.measure(model, answers=general_baseline.answers)
            forgetting = general.forgetting(general_baseline, general_tuned)
    rows = [
        ComparedRow(
            setup.rows.location(index),
            *_texts(models, sample),
            int(tuned.num_targets[index]),
            float(baseline.losses[index] / baseline.num_targets[index]),
            float(tuned.losses[index] / tuned.num_targets[index]),
            bool(baseline.is_right[index]),
            bool(tuned.is_right[index]),
        )
        for index, sample in enumerate(samples)
    ]
    share_name = _share_name(setup)
    return Comparison(
        loss=loss_difference(baseline.losses, tuned.losses, tuned.num_targets),
        share=share_difference(baseline.is_right, tuned.is_right) if share_name else None,
        share_name=share_name,
        rows=sorted(rows, key=lambda row: row.gain),
        forgetting=forgetting,
        seen_differently=seen_differently,
        may_have_new_head=models.is_base and setup.task.head in NEW_HEADS,
    )


def _general_rows(models: ComparedModels, path: Path | None, model: Any) -> GeneralRows | None:
    config, is_random = models.setup.config, models.tuned.origin.model.from_config is not None
    if TASKS[config.task.name].head != "causal_lm" or (path is None and is_random):
        return None
    return read_general(path or GENERAL_ROWS, config.data, models.tuned.run_inputs.processing.tokenizer, model)


def _texts(models: ComparedModels, sample: Features) -> tuple[str, str]:
    """Return the row's text, and its answer or label."""
    task, decode = models.setup.task, models.tuned.run_inputs.processing.tokenizer.decode
    prompt = task.prompt(sample)
    if prompt is None:
        return decode(sample.arrays["input_ids"].tolist(), skip_special_tokens=True), task.label_text(sample)
    return decode(list(prompt.input_ids), skip_special_tokens=True), decode(list(prompt.reference_ids))


_SHARES = {
    "classification": "accuracy",
    "preference": "chosen answer more likely",
    "reward": "chosen answer scored higher",
    "reranking": "positive ranked first",
}
"""The name of the share of right rows, by the section of the task."""


def _share_name(setup: EvaluationSetup) -> str:
    """Return the name of the share of right rows; empty if no row is right or wrong."""
    section, entry = setup.config.task, TASKS[setup.config.task.name]
    is_number = entry.classifies and section.classification.kind == "regression"
    if is_number or (entry.section == "reranking" and RERANKING_LOSSES[section.reranking.loss].scores is not None):
        return ""
    return _SHARES.get(entry.section or "", "exact match" if entry.generates else "")


def find_other_encodings(models: ComparedModels, *, trust_remote_code: bool) -> list[str]:
    """Return a sentence for each model whose own job or tokenizer encodes these rows differently. Collective.

    Raises UserError for a model with another vocabulary, which cannot read them.
    """
    setup, sentences = models.setup, []
    for target in (models.tuned,) if models.is_base else (models.tuned, models.baseline):
        own = _own_rules(target, trust_remote_code=trust_remote_code)
        config, processing = own.config, own.run_inputs.processing
        encoding = make_encoding(config.data, processing, own.task(), name=config.task.name)
        try:
            rows = prepare_set(setup.source, encoding, log=no_op)
        except DataError as error:
            sentences.append(f"{target.source} was trained with settings that refuse these rows: {error}")
            continue
        if rows.fingerprint == setup.rows.fingerprint:
            continue
        pairs = [(setup.rows[index], rows[index]) for index in range(min(len(rows), len(setup.rows)))]
        others = [index for index, (here, there) in enumerate(pairs) if not _is_same(here, there)]
        if not others and len(rows) == len(setup.rows):
            continue
        vocabularies = [
            each.get_vocab() for each in (processing.tokenizer, models.tuned.run_inputs.processing.tokenizer)
        ]
        if vocabularies[0] != vocabularies[1]:
            raise UserError(
                f"--against: {target.source} has another vocabulary ({len(vocabularies[0]):,} tokens in place of "
                f"{len(vocabularies[1]):,}), so losses per token do not compare. Compare answers: `finetune generate` "
                "with both, or `finetune evaluate` with evaluate.generate."
            )
        first = others[0] if others else len(pairs) - 1
        here, there = map(_token_counts, pairs[first])
        sentences.append(
            f"{target.source} was trained with another template, tokenizer or choice of targets than these rows "
            f"have now: {max(len(others), abs(len(rows) - len(setup.rows)))} of {len(setup.rows)} differ, first "
            f"{setup.rows.location(first)}: now {here}; in training {there}."
        )
    return sentences


def _own_rules(target: EvaluationTarget, *, trust_remote_code: bool) -> EvaluationTarget:
    """Return the target with its run's own job and its folder's own tokenizer, not the given ones."""
    saved, trusts, own = target.saved, trust_remote_code, target
    if saved is None or (saved.folder.parent / RESOLVED_NAME).is_file():
        own = find_evaluation_target(target.source, step=None, job=None, overrides=(), trust_remote_code=trusts)
    if saved is None:
        return own
    return replace(own, run_inputs=RunInputs(processing_in(saved, trust_remote_code=trusts), own.run_inputs.facts))


def _is_same(here: Features, there: Features) -> bool:
    names = here.arrays.keys()
    return names == there.arrays.keys() and all(np.array_equal(here.arrays[name], there.arrays[name]) for name in names)


def _token_counts(sample: Features) -> str:
    is_target = sample.arrays.get("is_target")
    targets = "" if is_target is None else f", {int(is_target.sum())} of them targets"
    return f"{sample.length} tokens{targets}"
