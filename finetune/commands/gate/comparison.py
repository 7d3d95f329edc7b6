"""The comparison of a tuned model with its base or another model on the same rows, and the verdict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.commands.evaluate import EvaluationSetup, EvaluationTarget, find_evaluation_target
from finetune.commands.export import processing_in
from finetune.commands.gate.differences import MIN_ROWS, PairedDifference, loss_difference, share_difference
from finetune.commands.gate.general import GENERAL_ROWS, MAX_ANSWER_TOKENS, Forgetting, GeneralRows, read_general
from finetune.commands.gate.rows import GreedyDecoder, RowResults, ShownRow, max_positions, measure_rows
from finetune.config.load import RESOLVED_NAME
from finetune.config.sections.evaluate import GenerateSection
from finetune.data.features import Features
from finetune.data.token_cache.cache import prepare_set
from finetune.errors import DataError
from finetune.model.frozen_models import reference_mode
from finetune.registry.tasks import TASKS
from finetune.run.setup.data import make_encoding
from finetune.run.state.run_folder import RunInputs
from finetune.runtime.optional import no_op

NUM_SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """What two models reach on the same rows."""

    loss: PairedDifference
    share: PairedDifference | None  # of right rows
    share_name: str
    rows: Sequence[Mapping[str, Any]]  # every row: JSON
    better: Sequence[ShownRow]
    worse: Sequence[ShownRow]
    num_better: int
    num_worse: int
    forgetting: Forgetting | None
    notes: Sequence[str]
    seen_differently: Sequence[str]  # sentences about rows that a model has seen otherwise in its training

    def failures(self, *, margin: float, max_forgetting: float) -> list[str]:
        """Return why the tuned model must not replace the baseline; nothing if it is better."""
        sentences, verdict = [f"Not comparable: {text}" for text in self.seen_differently], self.loss.verdict(margin)
        if self.loss.low is None and verdict == "undecided":
            sentences.append(f"{len(self.rows)} rows are too few: at least {MIN_ROWS} are needed.")
        elif verdict != "better":
            sentences.append(_NOT_BETTER[verdict].format(margin=f"{margin:g}"))
        forgetting = self.forgetting
        if forgetting is not None and forgetting.tokens_changed > max_forgetting:
            sentences.append(
                f"Forgets: {forgetting.tokens_changed:.0%} of the tokens of the baseline's answers to general rows "
                f"changed, more than {max_forgetting:.0%}."
            )
        return sentences


_NOT_BETTER = {
    "worse": "Worse: the loss is higher by more than {margin}.",
    "no difference": "No difference: the losses differ by less than {margin}.",
    "undecided": "Undecided: the interval of the gain is not above {margin}. More rows make it narrower.",
}


@dataclass(frozen=True)
class ComparedModels:
    """The two models, of which one is loaded at a time."""

    setup: EvaluationSetup  # of the tuned model; both are measured with its task, on its rows
    tuned: EvaluationTarget
    baseline: EvaluationTarget
    is_base: bool  # the baseline is the model as the tuned one's run began with it

    def with_reference(self) -> "ComparedModels":
        """Return the models with the outputs of a reference that the loss needs: the model that the job starts from."""
        if self.setup.task.precomputed is None:
            return self
        reference = self.setup.load_initial(replace(self.tuned, saved=None))
        return replace(self, setup=self.setup.with_frozen_outputs(reference))

    def load_tuned(self) -> Any:
        """Return the tuned model."""
        model = self.setup.load_initial(self.tuned)
        self.tuned.load_weights(model)
        return self.setup.accelerator.prepare_model(model, evaluation_mode=True)

    @contextmanager
    def baseline_loaded(self) -> Iterator[Any]:
        """Yield the baseline; the base is without the adapters that a run has added to it."""
        model = self.setup.load_initial(self.baseline)
        if not self.is_base:
            self.baseline.load_weights(model)
        model = self.setup.accelerator.prepare_model(model, evaluation_mode=True)
        with reference_mode(model, self.tuned.origin.model) if self.is_base else nullcontext():
            yield model


def compare_models(models: ComparedModels, *, general_rows: Path | None, trust_remote_code: bool) -> Comparison:
    """Return the comparison on the tuned model's validation rows, and on general rows where the model continues texts.

    General rows are those of the file, else, unless the job trains a model from random weights, the package's own. The
    tuned model is loaded twice: before the baseline, and after it has answered.
    """
    seen_differently = find_other_encodings(models, trust_remote_code=trust_remote_code)
    models = models.with_reference()
    setup, model = models.setup, models.load_tuned()
    device, count = setup.accelerator.device, len(setup.rows)
    samples = [setup.rows.intact(index) for index in range(count)]
    tuned = measure_rows(model, setup.task, samples, device=device)
    general, notes = _general_rows(models, general_rows, model)
    del model
    with models.baseline_loaded() as model:
        baseline = measure_rows(model, setup.task, samples, device=device)
        gains = (baseline.losses - tuned.losses) / tuned.num_targets
        shown = _ShownRows.of(models, samples, gains)
        first_answers = shown.answers(model)
        baseline_answers = None if general is None else general.measure_baseline(model)
    del model
    model, forgetting = models.load_tuned(), None
    if general is not None and baseline_answers is not None:
        forgetting = general.measure_forgetting(model, baseline_answers, num_shown=NUM_SHOWN)
    rows = shown.rows(baseline, tuned, zip(first_answers, shown.answers(model), strict=True))
    share_name = _share_name(setup)
    return Comparison(
        loss=loss_difference(baseline.losses, tuned.losses, tuned.num_targets),
        share=share_difference(baseline.is_right, tuned.is_right) if share_name else None,
        share_name=share_name,
        rows=[_as_json(setup.rows.location(index), index, baseline, tuned) for index in range(count)],
        better=[row for row in reversed(rows) if row.tuned_loss < row.baseline_loss][:NUM_SHOWN],
        worse=[row for row in rows if row.tuned_loss > row.baseline_loss][:NUM_SHOWN],
        num_better=int((gains > 0).sum()),
        num_worse=int((gains < 0).sum()),
        forgetting=forgetting,
        notes=notes,
        seen_differently=seen_differently,
    )


def _share_name(setup: EvaluationSetup) -> str:
    """Return the name of the share of right rows; empty if no row is right or wrong."""
    section, entry = setup.config.task, TASKS[setup.config.task.name]
    if entry.section == "preference":
        return "chosen answer more likely"
    if entry.classifies:
        return "" if section.classification.kind == "regression" else "accuracy"
    return "exact match" if entry.generates else ""


def _as_json(location: str, index: int, baseline: RowResults, tuned: RowResults) -> dict[str, Any]:
    return {
        "row": location,
        "targets": int(tuned.num_targets[index]),
        "baseline_loss": float(baseline.losses[index] / baseline.num_targets[index]),
        "tuned_loss": float(tuned.losses[index] / tuned.num_targets[index]),
        "baseline_is_right": bool(baseline.is_right[index]),
        "tuned_is_right": bool(tuned.is_right[index]),
    }


def _general_rows(models: ComparedModels, path: Path | None, model: Any) -> tuple[GeneralRows | None, list[str]]:
    """Return the general rows, and a note on what is left out; None without general rows."""
    config = models.setup.config
    if TASKS[config.task.name].head != "causal_lm":
        return None, []
    if path is None and models.tuned.origin.model.from_config is not None:
        return None, ["No general rows: the run began with random weights, which have nothing to forget."]
    decoder = GreedyDecoder(
        models.tuned.run_inputs.processing.tokenizer, models.setup.accelerator.device, MAX_ANSWER_TOKENS
    )
    longest = min(config.data.longest, max_positions(model) - MAX_ANSWER_TOKENS)
    general = read_general(path or GENERAL_ROWS, config.data, decoder, longest=longest)
    notes = [f"{general.num_left_out} general rows are left out: too long, or chats without a chat template."]
    return general, notes if general.num_left_out else []


@dataclass(frozen=True)
class _ShownRows:
    """The rows that are shown, those that got worse most first, those that got better most last."""

    setup: EvaluationSetup
    decoder: GreedyDecoder
    samples: Sequence[tuple[int, Features]]  # with their numbers

    @classmethod
    def of(cls, models: ComparedModels, samples: Sequence[Features], gains: np.ndarray) -> "_ShownRows":
        """Return the rows at both ends of the gains per target."""
        setup, order = models.setup, [int(index) for index in np.argsort(gains, kind="stable")]
        section = (setup.config.evaluate and setup.config.evaluate.generate) or GenerateSection()
        tokenizer = models.tuned.run_inputs.processing.tokenizer
        decoder = GreedyDecoder(tokenizer, setup.accelerator.device, section.max_new_tokens)
        ends = dict.fromkeys([*order[:NUM_SHOWN], *order[-NUM_SHOWN:]])
        return cls(setup, decoder, [(index, samples[index]) for index in ends])

    def answers(self, model: Any) -> list[str | None]:
        """Return the model's greedy answer to each of these rows; None if the task does not generate. Collective."""
        prompts = [self.setup.task.prompt(sample) for _, sample in self.samples]
        answers = iter(self.decoder.answers(model, [prompt for prompt in prompts if prompt is not None]))
        return [None if prompt is None else self.decoder.text(next(answers)) for prompt in prompts]

    def rows(
        self, baseline: RowResults, tuned: RowResults, answers: Iterable[tuple[str | None, str | None]]
    ) -> list[ShownRow]:
        """Return the rows with their texts and the answers of both models."""
        rows, task, text = [], self.setup.task, self.decoder.text
        for (index, sample), pair in zip(self.samples, answers, strict=True):
            prompt = task.prompt(sample)
            rows.append(
                ShownRow(
                    self.setup.rows.location(index),
                    text(sample.arrays["input_ids"].tolist() if prompt is None else prompt.input_ids),
                    task.label_text(sample) if prompt is None else text(prompt.reference_ids),
                    float(baseline.losses[index] / baseline.num_targets[index]),
                    float(tuned.losses[index] / tuned.num_targets[index]),
                    *pair,
                )
            )
        return rows


def find_other_encodings(models: ComparedModels, *, trust_remote_code: bool) -> list[str]:
    """Return a sentence for each model whose own job or tokenizer encodes these rows differently."""
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
        if others or len(rows) != len(setup.rows):
            first = others[0] if others else len(pairs) - 1
            here, there = (_excerpt(sample, setup) for sample in pairs[first])
            sentences.append(
                f"{target.source} was trained with another template, tokenizer or choice of targets than these rows "
                f"have now: {max(len(others), abs(len(rows) - len(setup.rows)))} of {len(setup.rows)} differ, first "
                f"{setup.rows.location(first)}: now {here}; in training {there}."
            )
    return sentences


def _own_rules(target: EvaluationTarget, *, trust_remote_code: bool) -> EvaluationTarget:
    """Return the target with the job of its run and the tokenizer in its folder, in place of those that are given."""
    saved, trusts = target.saved, trust_remote_code
    own = target
    if saved is None or (saved.folder.parent / RESOLVED_NAME).is_file():
        own = find_evaluation_target(target.source, step=None, job=None, overrides=(), trust_remote_code=trusts)
    if saved is None:
        return own
    return replace(own, run_inputs=RunInputs(processing_in(saved, trust_remote_code=trusts), own.run_inputs.facts))


def _is_same(here: Features, there: Features) -> bool:
    names = here.arrays.keys()
    return names == there.arrays.keys() and all(np.array_equal(here.arrays[name], there.arrays[name]) for name in names)


def _excerpt(sample: Features, setup: EvaluationSetup) -> str:
    is_target = sample.arrays.get("is_target")
    targets = "" if is_target is None else f", {int(is_target.sum())} of them targets"
    return f"{sample.length} tokens{targets}"
