"""Predictions for the rows of a file by models that do not generate text: classes, tags, numbers, vectors, scores."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.commands.evaluate import find_evaluation_target
from finetune.commands.export import processing_in, read_sentence_files
from finetune.config.load import RESOLVED_NAME
from finetune.config.sections.data import NO_LIMIT, DataSection, SourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.features import Features
from finetune.data.formats.columns import ColumnNames, Columns
from finetune.data.rows import FAULTS_OF_VALUES, RawRow, Row
from finetune.data.sources.local import find_local
from finetune.data.token_cache.counts import Counts
from finetune.errors import DataError, UserError
from finetune.model.loading.saved import SavedModel, load_saved_model
from finetune.registry.model_choices import POOLING_MODES
from finetune.registry.tasks import TASKS
from finetune.runtime.distributed import local_device
from finetune.runtime.optional import no_op
from finetune.task.classes import PROBABILITIES
from finetune.task.protocol import Predictor, Task, TaskContext, build_task

PREDICTION = "prediction"


@dataclass(frozen=True)
class RowAnswers:
    """How the rows of a file are answered, and the name of the column with the answers."""

    column: str
    raw: Sequence[RawRow]
    settings: Mapping[str, Any]  # JSON: what decides the answers besides the model
    compute: Callable[[Sequence[int]], Iterator[tuple[int, Any]]]  # from numbers of rows to these with their answers


@dataclass(frozen=True)
class PredictionTarget:
    """A task and its model, which has not been loaded yet, and how its job reads rows."""

    name: str  # of the task
    task: Task
    sources: Sequence[SourceSection]
    load: Callable[[], Any]


def find_predictions(
    source: Path, saved: SavedModel | None, *, rows: Path, batch_size: int, probabilities: bool, trust_remote_code: bool
) -> RowAnswers:
    """Return how the model predicts the rows of the file; without `saved`, the model of a checkpoint of a run.

    Rows are read by the columns and templates of the job, else by the names of its format. Raises UserError for a task
    without predictions, DataError for rows that lack what the model reads.
    """
    if saved is None or (saved.folder.parent / RESOLVED_NAME).is_file():
        target = _of_run(source, saved, trust_remote_code=trust_remote_code)
    else:
        target = _of_folder(saved, trust_remote_code=trust_remote_code)
    predictor: Predictor | None = getattr(target.task, "predictor", None)  # a plugin's task may have none
    if predictor is None:
        raise UserError(
            f"{source}: `finetune generate` does not predict rows for task `{target.name}`. "
            + _ADVICE.get(target.task.head, "Of a checkpoint, export the model first: `finetune export`.")
        )
    raw, contents, digest = _read(target, predictor, rows)

    def compute(numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
        device = local_device()  # chosen first: quantized weights are loaded to the current one
        model, cut = target.load().to(device).eval(), list[RawRow]()
        for start in range(0, len(numbers), batch_size * _BATCHES_SORTED_TOGETHER):
            window = numbers[start : start + batch_size * _BATCHES_SORTED_TOGETHER]
            samples = _samples(predictor, window, raw, contents, cut=cut)
            outputs = _outputs(predictor, model, samples, batch_size=batch_size)
            for number in window:
                prediction = predictor.prediction(contents[number], outputs[number]) if outputs[number] else {}
                shown = {name: prediction[name] for name in prediction if probabilities or name != PROBABILITIES}
                yield number, shown or None  # None for a row without text
        if cut:
            rows_cut = f"{len(cut):,} row{'s' * (len(cut) != 1)}"
            print(f"warning: longer than the maximum and cut off: {rows_cut}, the first {cut[0].location}")

    return RowAnswers(PREDICTION, raw, {"rows": digest, "probabilities": probabilities}, compute)


_ADVICE = {
    "masked_lm": "Measure it with `finetune evaluate`, or fill masks with transformers' `pipeline('fill-mask', ...)`."
}
_BATCHES_SORTED_TOGETHER = 32


def _of_run(source: Path, saved: SavedModel | None, *, trust_remote_code: bool) -> PredictionTarget:
    folder, trusts = source if saved is None else saved.folder, trust_remote_code
    target = find_evaluation_target(folder, step=None, job=None, overrides=(), trust_remote_code=trusts)
    data = target.config.data
    batching = data.batching.model_copy(update={"by": "samples", "padding_free": False})
    padded = data.model_copy(update={"over_length": "truncate", "batching": batching})
    task = target.run_inputs.task(target.config, data=padded)

    def load() -> Any:
        if saved is not None:
            return load_saved_model(replace(saved, head=task.head), key="generate", trust_remote_code=trusts)
        return target.load_weights(target.initial_model(task))

    own = (data.validation,) if data.validation is not None and data.validation.path is not None else ()
    return PredictionTarget(target.config.task.name, task, (*(data.train.mix or (data.train,)), *own), load)


def _of_folder(saved: SavedModel, *, trust_remote_code: bool) -> PredictionTarget:
    """Return the task of a folder that does not belong to a run, by its config and its sentence-transformers' files."""
    processing = processing_in(saved, trust_remote_code=trust_remote_code)
    config, files = saved.config, read_sentence_files(saved.folder)
    name, section = saved.head, dict[str, Any]()
    activation = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    if saved.head == "embedding":
        section = {"embedding": _embedding_section(saved, files)}
    elif saved.head == "sequence_classification" and activation is not None:
        name, section = "reranking", {"reranking": {"loss": "bce" if activation.endswith("Sigmoid") else "listwise"}}
    elif saved.head == "sequence_classification" and config.num_labels == 1 and config.problem_type is None:
        name = "reward"
    elif saved.head == "sequence_classification":
        kind = (config.problem_type or "single_label").removesuffix("_classification")
        name, section = "text_classification", {"classification": {"kind": kind}}
    limits = (
        files.get("sentence_bert_config.json", {}).get("max_seq_length"),
        getattr(processing.tokenizer, "model_max_length", None),
        getattr(config, "max_position_embeddings", None),
        NO_LIMIT,
    )
    longest = min(limit for limit in limits if limit)
    context = TaskContext(
        TaskSection.model_validate({"name": name, **section}),
        DataSection.model_validate({"train": {"path": "rows"}, "max_length": longest, "over_length": "truncate"}),
        processing.tokenizer,
        processing.processor,
        facts={"labels": list(saved.labels), "num_numbers": config.num_labels},
    )
    load = partial(load_saved_model, saved, key="generate", trust_remote_code=trust_remote_code)
    return PredictionTarget(name, build_task(context), (), load)


def _embedding_section(saved: SavedModel, files: Mapping[str, Any]) -> dict[str, Any]:
    pooling = files.get("1_Pooling/config.json", {})
    mode = next((mode for mode, key in POOLING_MODES.items() if pooling.get(key)), None)
    if mode is None:
        raise UserError(
            f"{saved.folder}: its files name no pooling of {', '.join(POOLING_MODES)}, so the vector of a text is not "
            "known. Give the folder of the run."
        )
    prompts = files.get("config_sentence_transformers.json", {}).get("prompts", {})
    return {
        "pooling": mode,
        "normalize": any(module["type"].endswith(".Normalize") for module in files.get("modules.json", ())),
        "prompts": {name: prompts.get(name, "") for name in ("query", "passage")},
    }


def _read(target: PredictionTarget, predictor: Predictor, rows: Path) -> tuple[list[RawRow], list[Row], str]:
    """Return the rows of the file, as read by the first of the job's sources that fits the first row, and a digest."""
    plain = SourceSection(path=str(rows))
    errors: list[DataError] = []
    for section in (*target.sources, plain):
        own = plain.model_copy(update={name: getattr(section, name) for name in _READ_KEYS})
        names = ColumnNames(
            format=own.format or TASKS[target.name].formats[0],
            columns=own.column_names,
            template=own.template,
            key="data.train",
            joined=own.joined_columns,
        )
        try:
            origin = find_local(own, key="--input", log=no_op)
            raw = list(chain.from_iterable(shard.rows() for shard in origin.shards()))
            contents = [_content(predictor, names, row) for row in raw[:1]]
        except DataError as error:
            errors.append(error)
            continue
        return raw, [*contents, *(_content(predictor, names, row) for row in raw[1:])], origin.digest
    raise errors[0]


_READ_KEYS = ("format", "columns", "template", "delimiter", "quotes", "encoding", "records")


def _content(predictor: Predictor, names: ColumnNames, raw: RawRow) -> Row:
    row = raw.parse()
    if row.keys() == {"prompt"} and isinstance(row["prompt"], str):  # a text without columns
        row = {"text": row["prompt"], "image": row["prompt"]}
    try:
        return predictor.read(Columns(names, row, origin=raw.origin))
    except (DataError, *FAULTS_OF_VALUES) as error:
        raise DataError(f"{raw.location}: {error}") from error


def _samples(
    predictor: Predictor, numbers: Sequence[int], raw: Sequence[RawRow], contents: Sequence[Row], *, cut: list[RawRow]
) -> list[tuple[int, Features]]:
    """Return the samples of the rows, each with the number of its row; append rows that were truncated to `cut`."""
    samples: list[tuple[int, Features]] = []
    for number, outcome in zip(numbers, predictor.encode([contents[number] for number in numbers]), strict=True):
        if isinstance(outcome, DataError):
            raise DataError(f"{raw[number].location}: {outcome}") from outcome
        num_cut, limit = 0, predictor.limit
        for sample in outcome if isinstance(outcome, tuple) else (outcome,):
            if isinstance(sample, Features):
                fits = limit is None or limit.fits(sample)
                shorter, counts = ((sample,), Counts()) if limit is None or fits else limit.shorten(sample)
                samples += [(number, part) for part in shorter]
                num_cut += sample.cut_tokens + counts.truncated_tokens
        cut += [raw[number]] * (num_cut > 0)
    return samples


@torch.no_grad()
def _outputs(
    predictor: Predictor, model: Any, samples: Sequence[tuple[int, Features]], *, batch_size: int
) -> dict[int, list[Tensor]]:
    """Return the outputs of the samples of each row, in the row's order; none for a row without samples."""
    order = sorted(range(len(samples)), key=lambda index: -samples[index][1].length)
    by_sample: dict[int, Tensor] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        collated = predictor.collate([samples[index][1] for index in batch]).to(model.device)
        computed = (output.float().cpu() for output in predictor.outputs(model, collated))
        by_sample |= dict(zip(batch, computed, strict=True))
    outputs: dict[int, list[Tensor]] = defaultdict(list)
    for index, (number, _) in enumerate(samples):
        outputs[number].append(by_sample[index])
    return outputs
