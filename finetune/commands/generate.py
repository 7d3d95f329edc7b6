"""`finetune generate`: answer every row of a file once, in the file's order, on all launched processes.

Each process holds the whole model, whatever the launched strategy. Answers are kept in a hidden folder next to the
output, one file per rank, until all are complete; a command that was killed resumes from them.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.commands.export import processing_in
from finetune.commands.source import use_written_arguments
from finetune.config.sections.data import SourceSection
from finetune.data.encoding.conversation import ChatPrompt, prompt_ids, read_prompt
from finetune.data.rows import RawRow, Row
from finetune.data.sources.local import find_local
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import DataError, UserError
from finetune.model.generation import SamplingParams, generate_batch
from finetune.model.loading.saved import (
    SavedModel,
    attach_adapters,
    inspect_model_folder,
    load_saved_base,
    load_saved_model,
)
from finetune.runtime import distributed
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

    @classmethod
    def open(cls, output: Path, settings: Any) -> "PartialAnswers":
        """Return the partial answers of this command; raises UserError for those of another one. Collective."""
        parts = cls(output, output.with_name(f".{output.name}.parts"))
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

    def keep(self, number: int, text: str) -> None:
        """Append one answer on a new line, even after a line that a killed process left incomplete."""
        with (self.folder / f"rank-{distributed.rank():05d}.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"row": number, ANSWER: text}) + "\n")

    def join(self, rows: Sequence[Row]) -> None:
        """Write the output atomically and remove the parts; raises UserError if an answer is missing. On rank 0."""
        answers = dict(self._all())
        missing = next((number for number in range(len(rows)) if number not in answers), None)
        if missing is not None:
            raise UserError(
                f"{self.folder} has no answer for row {missing + 1:,} of the input, although one was written: another "
                "process changed the folder. Delete the folder and start again."
            )
        lines = (format_json({**row, ANSWER: answers[n]}, default=str) for n, row in enumerate(rows))
        atomic.write_text(self.output, "".join(f"{line}\n" for line in lines))
        shutil.rmtree(self.folder)

    def _all(self) -> Iterator[tuple[int, str]]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            require_regular(path)  # a device would accept every answer and store none
            for line in atomic.read_json_lines(path):
                if isinstance(line, dict) and isinstance(line.get("row"), int) and isinstance(line.get(ANSWER), str):
                    yield line["row"], line[ANSWER]


def _read_settings(note: Path) -> Any:
    try:
        return read_json(note)
    except (OSError, ValueError):
        return None


_SECONDS_BETWEEN_LOG_LINES = 20.0
_BATCHES_SORTED_TOGETHER = 32


@dataclass(frozen=True)
class TokenizedPrompt:
    """The tokenized prompt of a row to answer."""

    number: int  # in the file, from 0
    tokens: Sequence[int]


def generate_file(
    source: Path,
    *,
    rows: Path,
    output: Path,
    adapter: Path | None,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    top_p: float,
    seed: int,
    system: str | None,
    template_arguments: Sequence[str] = (),
    trust_remote_code: bool,
) -> int:
    """Write each row with its `answer` to the output, which appears whole; return the exit code.

    Answers written before a process was killed are kept next to the output, and the same command resumes from them.
    Raises UserError or DataError for a model that does not generate text, rows without a prompt, and an output that
    already exists. Collective over all launched processes.
    """
    num_answers = _answer_file(
        source,
        rows=rows,
        output=output,
        adapter=adapter,
        sampling=SamplingParams(max_new_tokens, temperature, top_p),
        batch_size=batch_size,
        seed=seed,
        system=system,
        template_arguments=template_arguments,
        trust_remote_code=trust_remote_code,
    )
    if distributed.is_main():
        print(f"{num_answers:,} answers in {output}")
    return distributed.shut_down(0)


def generate_answers(
    source: Path,
    rows: Sequence[Row],
    *,
    adapter: Path | None,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    top_p: float,
    seed: int,
    system: str | None,
    trust_remote_code: bool,
) -> list[str]:
    """Return the answer to each row on every rank. Raises what `generate_file` does. Collective."""
    distributed.init_cpu_process_group()
    scratch = Path(distributed.broadcast_object(tempfile.mkdtemp(prefix="finetune-") if distributed.is_main() else ""))
    try:
        if distributed.is_main():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (scratch / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        distributed.barrier()
        _answer_file(
            source,
            rows=scratch / "rows.jsonl",
            output=scratch / "answers.jsonl",
            adapter=adapter,
            sampling=SamplingParams(max_new_tokens, temperature, top_p),
            batch_size=batch_size,
            seed=seed,
            system=system,
            template_arguments=(),
            trust_remote_code=trust_remote_code,
        )
        distributed.barrier()  # rank 0 has joined the answers
        answers = [str(row[ANSWER]) for row in atomic.read_json_lines(scratch / "answers.jsonl")]
        distributed.barrier()  # all have read them
    finally:
        if distributed.is_main():
            shutil.rmtree(scratch, ignore_errors=True)
    return answers


def _answer_file(
    source: Path,
    *,
    rows: Path,
    output: Path,
    adapter: Path | None,
    sampling: SamplingParams,
    batch_size: int,
    seed: int,
    system: str | None,
    template_arguments: Sequence[str],
    trust_remote_code: bool,
) -> int:
    """Write the answers to the output and return their number. Collective."""
    quiet_libraries(is_main=distributed.is_main())
    saved = inspect_model_folder(source, key="generate", trust_remote_code=trust_remote_code)
    _check(saved, output=output, adapter=adapter)
    origin = find_local(SourceSection(path=str(rows)), key="--input", log=no_op)
    # An invalid file is refused before the whole of it is hashed.
    raw = [row for shard in origin.shards() for row in shard.rows()]
    settings = {"rows": origin.digest, "sampling": asdict(sampling), "seed": seed, "system": system}
    distributed.init_cpu_process_group()
    settings |= {"model": _weight_files(saved.folder), "adapter": _weight_files(adapter)}
    if template_arguments:
        settings["template_arguments"] = list(template_arguments)
    parts = PartialAnswers.open(output, settings)
    tokenizer = _tokenizer(saved, template_arguments, trust_remote_code=trust_remote_code)
    model = _load(saved, adapter, trust_remote_code=trust_remote_code)
    generator = _Generator(model, tokenizer, sampling=sampling, batch_size=batch_size, seed=seed)
    generator.answer([read_prompt(row, system=system) for row in raw], raw, parts=parts)
    distributed.barrier()  # all answers are on the disk
    if distributed.is_main():
        parts.join([row.parse() for row in raw])
    return len(raw)


def _weight_files(folder: Path | None) -> Any:
    """Return the weight files with size and modification time, which identify a model."""
    if folder is None:
        return None
    states = [(path, path.stat()) for path in sorted(folder.absolute().glob("*.safetensors"))]
    return [[str(path), state.st_size, state.st_mtime_ns] for path, state in states]


def _check(saved: SavedModel, *, output: Path, adapter: Path | None) -> None:
    if not saved.can_generate:
        raise UserError(f"{saved.folder}: a `{saved.head}` model does not generate text. Choose one that does.")
    if adapter is not None and saved.adapter is not None:
        raise UserError(f"--adapter: {saved.folder} is itself an adapter. Pass a full model, or omit --adapter.")
    if output.exists():
        raise UserError(f"--output {output} already exists. Choose another file, or delete it.")


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


def local_device() -> torch.device:
    """Return this process's accelerator, by its local rank; the CPU on a machine without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "there is one"
    return torch.device(accelerator.type, index)


@dataclass(frozen=True)
class _Generator:
    model: Any
    tokenizer: Any
    sampling: SamplingParams
    batch_size: int
    seed: int

    def answer(self, prompts: Sequence[ChatPrompt], raw: Sequence[RawRow], *, parts: PartialAnswers) -> None:
        """Answer this process's share of the unanswered rows, and write the answers after every batch."""
        for row in raw:
            if ANSWER in row.parse():
                raise DataError(f"{row.location}: already has a column `{ANSWER}`. Rename it.")
        answered = parts.answered()
        unanswered = [number for number in range(len(prompts)) if number not in answered]
        share = unanswered[distributed.rank() :: distributed.world()]
        own = [TokenizedPrompt(number, self._tokens(prompts[number], raw[number])) for number in share]
        logged_at = time.monotonic()
        num_done = 0
        for batch in self._batches(own):
            for answered_prompt, text in zip(batch, self._answers(batch), strict=True):
                parts.keep(answered_prompt.number, text)
            num_done += len(batch)
            if distributed.is_main() and time.monotonic() - logged_at > _SECONDS_BETWEEN_LOG_LINES:
                logged_at = time.monotonic()
                print(f"answered {num_done:,} of {len(own):,} in this process", flush=True)

    def _tokens(self, prompt: ChatPrompt, raw: RawRow) -> list[int]:
        tokens = prompt_ids(self.tokenizer, prompt)
        limit = self._limit()
        if limit is not None and len(tokens) >= limit:
            raise DataError(
                f"{raw.location}: the prompt has {len(tokens):,} tokens, but the model reads at most {limit:,}."
            )
        return tokens

    def _limit(self) -> int | None:
        if getattr(self.model.config, "is_encoder_decoder", False):
            return None
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None

    def _batches(self, prompts: Sequence[TokenizedPrompt]) -> Iterator[Sequence[TokenizedPrompt]]:
        """Yield batches of prompts of similar length; one that leaves no room for a full answer is batched alone."""
        window = self.batch_size * _BATCHES_SORTED_TOGETHER
        for start in range(0, len(prompts), window):
            by_length = sorted(prompts[start : start + window], key=lambda prompt: len(prompt.tokens), reverse=True)
            roomy = [prompt for prompt in by_length if self._answer_limit(prompt) == self.sampling.max_new_tokens]
            yield from ([prompt] for prompt in by_length if self._answer_limit(prompt) < self.sampling.max_new_tokens)
            for first in range(0, len(roomy), self.batch_size):
                yield roomy[first : first + self.batch_size]

    def _answer_limit(self, prompt: TokenizedPrompt) -> int:
        limit = self._limit()
        max_new_tokens = self.sampling.max_new_tokens
        return max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt.tokens))

    def _answers(self, batch: Sequence[TokenizedPrompt]) -> list[str]:
        sampling = SamplingParams(self._answer_limit(batch[0]), self.sampling.temperature, self.sampling.top_p)
        generated = generate_batch(
            self.model,
            [prompt.tokens for prompt in batch],
            [derive_seed(self.seed, "generate", prompt.number) for prompt in batch],
            sampling=sampling,
            pad_id=pad_id(self.tokenizer),
            stop_ids=stop_ids(self.tokenizer),
        )
        return [str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in generated]
