"""`finetune generate`: answer every row of a file once, in the file's order, on all launched processes.

A model that does not generate text answers with its prediction. Each process holds the whole model, whatever the
launched strategy. Answers are kept in a hidden folder next to the output, one file per rank, until all are complete; a
command that was killed resumes from them.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.commands.export import is_run, processing_in
from finetune.commands.predict import RowAnswers, find_predictions
from finetune.commands.source import use_written_arguments
from finetune.config.sections.data import NO_LIMIT, SourceSection
from finetune.data.encoding.conversation import prompt_ids, read_prompt
from finetune.data.rows import Row
from finetune.data.sources.local import find_local
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import DataError, UserError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import (
    SavedModel,
    attach_adapters,
    find_model_folder,
    inspect_model_folder,
    load_saved_base,
    load_saved_model,
)
from finetune.runtime import distributed
from finetune.runtime.distributed import local_device
from finetune.runtime.files import atomic
from finetune.runtime.files.read import read_json, require_regular
from finetune.runtime.optional import no_op
from finetune.runtime.seeds import derive_seed
from finetune.runtime.text.redact import redact_known_values
from finetune.runtime.text.terminal import format_json, quiet_libraries
from finetune.task.causal_lm import pad_id

ANSWER = "answer"


@dataclass(frozen=True)
class PartialAnswers:
    """Answers of an unfinished command, in a hidden folder next to the output, one file per rank."""

    output: Path
    folder: Path
    column: str  # that an answer is written to

    @classmethod
    def open(cls, output: Path, settings: Any, *, column: str) -> "PartialAnswers":
        """Return the partial answers of this command; raises UserError for answers of another command. Collective."""
        parts = cls(output, output.with_name(f".{output.name}.parts"), column)
        note = parts.folder / "about.json"
        if distributed.is_main() and not note.is_file():
            atomic.write_json(note, settings)
        distributed.barrier()
        if _read_settings(note) != redact_known_values(settings):
            raise UserError(
                f"{parts.folder} holds answers of an earlier command with another model, input or settings. Delete it "
                "to start over, or choose another --output."
            )
        return parts

    def answered(self) -> set[int]:
        """Return the numbers of the rows that have an answer. Collective."""
        numbers = {number for number, _ in self._all()}
        distributed.barrier()  # nobody writes before all have looked: the shares must be cut alike
        return numbers

    def keep(self, number: int, answer: Any) -> None:
        """Append one answer on a new line, even after a line that a killed process left incomplete."""
        with (self.folder / f"rank-{distributed.rank():05d}.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"row": number, self.column: answer}) + "\n")

    def join(self, rows: Sequence[Row]) -> None:
        """Write the output atomically and remove the parts; raises UserError if an answer is missing. On rank 0."""
        answers = dict(self._all())
        missing = next((number for number in range(len(rows)) if number not in answers), None)
        if missing is not None:
            raise UserError(
                f"{self.folder} has no answer for row {missing + 1:,} of the input, although one was written: another "
                "process changed the folder. Delete the folder and start again."
            )
        lines = (format_json({**row, self.column: answers[n]}, default=str) for n, row in enumerate(rows))
        atomic.write_text(self.output, "".join(f"{line}\n" for line in lines))
        shutil.rmtree(self.folder)

    def _all(self) -> Iterator[tuple[int, Any]]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            require_regular(path)  # a device would accept every answer and store none
            for line in atomic.read_json_lines(path):
                if isinstance(line, dict) and isinstance(line.get("row"), int) and self.column in line:
                    yield line["row"], line[self.column]


def _read_settings(note: Path) -> Any:
    try:
        return read_json(note)
    except (OSError, ValueError):
        return None


_SECONDS_BETWEEN_LOG_LINES = 20.0
_BATCHES_SORTED_TOGETHER = 32


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of the command."""

    adapter: Path | None
    max_new_tokens: int
    batch_size: int
    temperature: float
    top_p: float
    seed: int
    system: str | None
    template_arguments: Sequence[str] = ()
    probabilities: bool = False
    trust_remote_code: bool

    @property
    def sampling(self) -> SamplingParams:
        """Return how tokens are drawn."""
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_p)

    def refuse_unused(self, *, generates: bool) -> None:
        """Raise UserError for an option that does not apply to a model that `generates` text, or to another one."""
        given = {
            "adapter": self.adapter,
            "system": self.system,
            "temperature": self.temperature,
            "template-argument": self.template_arguments,
        }
        for name, value in ({"probabilities": self.probabilities} if generates else given).items():
            if value:
                what = "generated text" if generates else "predictions: the model does not generate text"
                raise UserError(f"--{name} does not apply to {what}. Leave it out.")


def generate_file(source: Path, *, rows: Path, output: Path, options: GenerationOptions) -> int:
    """Write each row with its `answer` or `prediction` to the output, which appears whole; return the exit code.

    Answers written before a process was killed are kept next to the output, and the same command resumes from them.
    Raises UserError or DataError for a model that neither generates text nor predicts rows, an option that does not
    apply to it, rows without the columns that it needs, and an output that already exists. Collective over all
    launched processes.
    """
    answers = _answer_file(source, rows=rows, output=output, options=options)
    if distributed.is_main():
        number = len(answers.raw)
        print(f"{number:,} {answers.column}{'s' * (number != 1)} in {output}")
    return distributed.shut_down(0)


def generate_answers(source: Path, rows: Sequence[Row], options: GenerationOptions) -> list[Any]:
    """Return the answer or prediction of each row on every rank. Raises what `generate_file` does. Collective."""
    distributed.init_cpu_process_group()
    scratch = Path(distributed.broadcast_object(tempfile.mkdtemp(prefix="finetune-") if distributed.is_main() else ""))
    try:
        if distributed.is_main():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (scratch / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        distributed.barrier()
        output = scratch / "answers.jsonl"
        written = _answer_file(source, rows=scratch / "rows.jsonl", output=output, options=options)
        distributed.barrier()  # rank 0 has joined the answers
        answers = [row[written.column] for row in atomic.read_json_lines(output)]
        distributed.barrier()  # all have read them
    finally:
        if distributed.is_main():
            shutil.rmtree(scratch, ignore_errors=True)
    return answers


def _answer_file(source: Path, *, rows: Path, output: Path, options: GenerationOptions) -> RowAnswers:
    """Write the answers to the output and return how they were made. Collective."""
    quiet_libraries(is_main=distributed.is_main())
    if output.exists():
        raise UserError(f"--output {output} already exists. Choose another file, or delete it.")
    trusts, saved = options.trust_remote_code, None
    if find_model_folder(source) is not None or not is_run(source):  # else a checkpoint
        saved = inspect_model_folder(source, key="generate", trust_remote_code=trusts)
    options.refuse_unused(generates=saved is not None and saved.can_generate)
    if saved is not None and saved.can_generate:
        answers = _text_answers(saved, rows, options)
    else:
        answers = find_predictions(
            source,
            saved,
            rows=rows,
            batch_size=options.batch_size,
            probabilities=options.probabilities,
            trust_remote_code=trusts,
        )
    distributed.init_cpu_process_group()
    folders = {"model": source if saved is None else saved.folder, "adapter": options.adapter}
    models = {name: _weight_files(folder) for name, folder in folders.items()}
    parts = PartialAnswers.open(output, {**answers.settings, **models}, column=answers.column)
    _answer_share(answers, parts)
    distributed.barrier()  # all answers are on the disk
    if distributed.is_main():
        parts.join([row.parse() for row in answers.raw])
    return answers


def _answer_share(answers: RowAnswers, parts: PartialAnswers) -> None:
    """Answer this process's share of the unanswered rows, and write the answers as they come."""
    for row in answers.raw:
        if answers.column in row.parse():
            raise DataError(f"{row.location}: already has a column `{answers.column}`. Rename it.")
    answered = parts.answered()
    unanswered = [number for number in range(len(answers.raw)) if number not in answered]
    share = unanswered[distributed.rank() :: distributed.world()]
    logged_at = time.monotonic()
    for num_done, (number, answer) in enumerate(answers.compute(share) if share else (), start=1):
        parts.keep(number, answer)
        if distributed.is_main() and time.monotonic() - logged_at > _SECONDS_BETWEEN_LOG_LINES:
            logged_at = time.monotonic()
            print(f"answered {num_done:,} of {len(share):,} in this process", flush=True)


def _weight_files(folder: Path | None) -> Any:
    """Return the weight files with size and modification time, which identify a model."""
    if folder is None:
        return None
    states = [(path, path.stat()) for path in sorted(folder.absolute().rglob("*.safetensors"))]
    return [[str(path), state.st_size, state.st_mtime_ns] for path, state in states]


def _text_answers(saved: SavedModel, rows: Path, options: GenerationOptions) -> RowAnswers:
    if options.adapter is not None and saved.adapter is not None:
        raise UserError(f"--adapter: {saved.folder} is itself an adapter. Pass a full model, or omit --adapter.")
    origin = find_local(SourceSection(path=str(rows)), key="--input", log=no_op)
    # An invalid file is refused before the whole of it is hashed.
    raw = [row for shard in origin.shards() for row in shard.rows()]
    settings: dict[str, Any] = {"rows": origin.digest, "sampling": asdict(options.sampling), "seed": options.seed}
    settings |= {"system": options.system}
    if options.template_arguments:
        settings["template_arguments"] = list(options.template_arguments)

    def compute(numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
        trusts = options.trust_remote_code
        tokenizer = _tokenizer(saved, options.template_arguments, trust_remote_code=trusts)
        model = _load(saved, options.adapter, trust_remote_code=trusts)
        prompts = [read_prompt(row, system=options.system) for row in raw]
        tokens = {number: prompt_ids(tokenizer, prompts[number]) for number in numbers}
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not limit or getattr(model.config, "is_encoder_decoder", False):
            limit = NO_LIMIT
        for number in numbers:
            if len(tokens[number]) >= limit:
                raise DataError(
                    f"{raw[number].location}: the prompt has {len(tokens[number]):,} tokens, but the model reads at "
                    f"most {limit:,}."
                )
        yield from _generate(model, tokenizer, tokens, options, limit=limit)

    return RowAnswers(ANSWER, raw, settings, compute)


def _generate(
    model: Any, tokenizer: Any, prompts: Mapping[int, Sequence[int]], options: GenerationOptions, *, limit: int
) -> Iterator[tuple[int, str]]:
    """Yield the number of each prompt and its answer, in batches of similar length.

    A prompt that leaves no room for a full answer is answered alone.
    """
    numbers, size = list(prompts), options.batch_size
    num_free = {number: min(options.max_new_tokens, limit - len(prompts[number])) for number in numbers}
    for start in range(0, len(numbers), size * _BATCHES_SORTED_TOGETHER):
        window = numbers[start : start + size * _BATCHES_SORTED_TOGETHER]
        by_length = sorted(window, key=lambda number: len(prompts[number]), reverse=True)
        roomy = [number for number in by_length if num_free[number] == options.max_new_tokens]
        batches = [[number] for number in by_length if num_free[number] < options.max_new_tokens]
        batches += [roomy[first : first + size] for first in range(0, len(roomy), size)]
        for batch in batches:
            generated = generate_batch(
                model,
                [prompts[number] for number in batch],
                [derive_seed(options.seed, "generate", number) for number in batch],
                sampling=replace(options.sampling, max_new_tokens=num_free[batch[0]]),
                pad_id=pad_id(tokenizer),
                stop_ids=stop_ids(tokenizer),
            )
            for number, tokens in zip(batch, generated, strict=True):
                yield number, str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _tokenizer(saved: SavedModel, template_arguments: Sequence[str], *, trust_remote_code: bool) -> Any:
    tokenizer = processing_in(saved, trust_remote_code=trust_remote_code).tokenizer
    if tokenizer is None:
        raise UserError(
            f"{saved.folder} has no tokenizer, and neither has its base model. Copy tokenizer files into it."
        )
    use_written_arguments(tokenizer, template_arguments)
    return tokenizer


def _load(saved: SavedModel, adapter: Path | None, *, trust_remote_code: bool) -> Any:
    device = local_device()  # chosen first: quantized weights are loaded to the current one
    if adapter is None:
        model = load_saved_model(saved, key="generate", trust_remote_code=trust_remote_code)
    else:
        base = load_saved_base(saved, key="generate", trust_remote_code=trust_remote_code)
        model = attach_adapters(base, {"default": adapter}, key="--adapter")
    return model.to(device)
