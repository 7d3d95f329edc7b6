"""Verifies an export: a program in a fresh process loads the folder and compares it with the expected values."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from finetune.errors import ExportError
from finetune.export.save import ExportReport, TextPreprocessor, generation_config
from finetune.export.threads import map_in_threads, num_threads_for
from finetune.export.verify import program
from finetune.export.verify.files import file_problems
from finetune.export.verify.rows import HeldRow
from finetune.export.verify.tolerance import Precision, tolerance
from finetune.export.weights import build_meta_model, unwrap_adapter
from finetune.model.adapters.context import has_adapter
from finetune.model.loading.architecture import HEADS
from finetune.model.loading.model_files import CONFIG
from finetune.model.loading.saved import CONFIG_FOLDER
from finetune.runtime.files.atomic import replace_folder
from finetune.runtime.resources import available_bytes

FAILED_SUFFIX = ".failed"
"""The suffix of a folder that does not hold the trained model; the one of a run is `FAILED_FINAL_FOLDER`."""

_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_")
_LIBRARIES_BYTES = 1 << 30
_LIMIT_SECONDS, _BYTES_PER_SECOND = 1800.0, 10 << 20
"""The time limit of a verification: a constant, and one second for this number of bytes of weights."""


@dataclass(frozen=True)
class Expected:
    """The expected results of the exported model, from the training."""

    rows: Sequence[HeldRow] = ()
    logits: Sequence[Tensor] | None = None  # None: the trained model computes with other weights, quantized ones
    precision: Precision = "float32"  # in which they were computed
    tokens: Mapping[str, Any] | None = None  # of `expected_tokens`
    text: TextPreprocessor | None = None
    unmerged: Path | None = None  # a folder with the adapter that was merged


@dataclass(frozen=True)
class ModelFacts:
    """The facts that the program needs to load the model."""

    head: str
    class_name: str
    is_adapter: bool
    uses_peft: bool  # also for a merge
    base: str | None  # of the adapter: a name or folder; None where it is in `base/`
    num_embeddings: int
    num_layers: int
    num_parameters: int
    config: str  # as JSON
    generation_config: GenerationConfig | None  # None: it generates no text
    load_options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def model_facts(
    model: Any, *, head: str, merge: bool, trust_remote_code: bool, options: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Return the facts of a model that is exported; `options` are those with which its base is found."""
    whole = unwrap_adapter(model)
    meta_model = build_meta_model(whole, dtype=torch.float32)
    text = whole.config.get_text_config()
    return ModelFacts(
        head=head,
        class_name=type(meta_model).__name__,
        is_adapter=has_adapter(model) and not merge,
        uses_peft=has_adapter(model),
        base=whole.name_or_path or None,
        num_embeddings=int(getattr(text, "vocab_size", 0) or 0),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 12),
        num_parameters=sum(parameter.numel() for parameter in meta_model.parameters()),
        config=meta_model.config.to_json_string(),
        generation_config=getattr(whole, "generation_config", None) if whole.can_generate() else None,
        load_options=dict(options or {}),
        trust_remote_code=trust_remote_code,
    )


class ExportVerifier:
    """A fresh process that imports libraries while the folder is being written, and then verifies it."""

    def __init__(self, facts: ModelFacts, *, num_threads: int) -> None:
        self._facts = facts
        self._num_threads = num_threads
        self._folder = TemporaryDirectory(prefix="finetune-verify-")
        self._log = Path(self._folder.name) / "log.txt"
        words = [HEADS[facts.head].__name__, "AutoTokenizer", facts.class_name, *(["peft"] if facts.uses_peft else [])]
        with self._log.open("wb") as log:
            self._process = start_program(words, log=log.fileno())

    def __enter__(self) -> "ExportVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def check(self, report: ExportReport, expected: Expected, *, final: Path | None = None) -> str:
        """Return a sentence that says what was compared and found equal.

        Raises ExportError where the folder does not hold the trained model. The folder is then renamed to `final`, to
        which the caller would have moved it, with a suffix, so that nobody uses it by accident.
        """
        started = time.monotonic()
        request = self._request(report, expected)
        path = Path(self._folder.name) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        answer = self._answer(path, limit_seconds=_LIMIT_SECONDS + report.size_bytes / _BYTES_PER_SECOND)
        if answer["problems"]:
            is_wrong = answer.get("is_complete", True)
            aside = failed_folder(final or report.folder)
            raise ExportError(_refusal(report.folder, answer["problems"], aside=aside, is_wrong=is_wrong))
        shutil.rmtree(failed_folder(final or report.folder), ignore_errors=True)  # of an earlier attempt
        return _sentence(answer, num_rows=len(expected.rows), seconds=time.monotonic() - started)

    def _answer(self, request: Path, *, limit_seconds: float) -> dict[str, Any]:
        limit = Timer(limit_seconds, self._process.kill)
        limit.daemon = True
        limit.start()
        with suppress(BrokenPipeError):  # the process has ended: its log has the reason
            self._process.communicate(f"{request}\n".encode())
        code = self._process.wait()
        is_late = limit.finished.is_set()
        limit.cancel()
        answer = request.with_name(program.ANSWER)
        if not answer.is_file():
            lines = self._log.read_text(errors="replace").strip().splitlines()
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            if is_late:
                reason = f"no answer after {limit_seconds / 60:.0f} minutes"
            last = lines[-1][:300] if lines else "no output"
            return {"problems": [f"the process that loads it ended with {reason}: {last}"], "is_complete": False}
        values: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return values

    def _request(self, report: ExportReport, expected: Expected) -> dict[str, Any]:
        facts = self._facts
        written = _written_precision(report)
        fits = self._fits(is_merge=expected.unmerged is not None)
        rows = Path(self._folder.name) / "rows.safetensors" if expected.rows and fits else None
        if rows is not None:
            _write_rows(rows, expected)
        limits = {
            "tolerance": tolerance(expected.precision, written, num_layers=facts.num_layers, of="the trained model's"),
            "merge_tolerance": tolerance(written, num_layers=facts.num_layers, of="those of base and adapter unmerged"),
            "rounded_tolerance": tolerance("float32", num_layers=facts.num_layers, of="peft's merge"),
        }
        return {
            "folder": str(report.folder),
            "head_class": HEADS[facts.head].__name__,
            "is_adapter": facts.is_adapter,
            "base": self._base(report.folder, expected),
            "trust_remote_code": facts.trust_remote_code,
            "num_threads": self._num_threads,
            "rows": None if rows is None else str(rows),
            "tokens": expected.tokens,
            "problems": list(file_problems(report.folder, report.files, self._settings(expected))),
            "tensors": _digests(report.tensors),
            "adapter_tensors": _digests(report.adapter_tensors),
            "only_tensors": not fits,
            "compares_logits": expected.logits is not None,
            "unmerged": None if expected.unmerged is None else str(expected.unmerged),
            "merged_dtype": written,
            **{name: limit.as_json() for name, limit in limits.items()},
        }

    def _settings(self, expected: Expected) -> dict[str, str]:
        """Return the expected values of the folder's JSON files, as the objects in memory serialize themselves."""
        facts, text = self._facts, expected.text
        files = {} if facts.is_adapter else {CONFIG: facts.config}
        if facts.generation_config is not None and text is not None:
            files[GENERATION_CONFIG_NAME] = generation_config(facts.generation_config, text).to_json_string()
        if text is not None and (backend := getattr(text.tokenizer, "backend_tokenizer", None)) is not None:
            files[FULL_TOKENIZER_FILE] = backend.to_str()
        return files

    def _base(self, folder: Path, expected: Expected) -> dict[str, Any]:
        """Return where the base of the adapter is found, and how its config and size differ."""
        owner = expected.unmerged or folder
        config = owner / CONFIG_FOLDER
        return {
            "place": self._facts.base,
            "options": dict(self._facts.load_options),
            "config": str(config) if config.is_dir() else None,
            "num_embeddings": self._facts.num_embeddings,
        }

    def _fits(self, *, is_merge: bool) -> bool:
        """Return whether the model fits in the host's free memory in float32; for a merge, one and a half of it."""
        needed = int(self._facts.num_parameters * 4 * (1.6 if is_merge else 1.1)) + _LIBRARIES_BYTES
        return needed < available_bytes()


def start_program(words: Sequence[str], *, log: int) -> "subprocess.Popen[bytes]":
    """Start the program in a fresh interpreter without a device, outside the launcher's process group."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "USE_TORCH": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", str(program.__file__), *words],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # a signal to the run's group is not meant for it
    )


@contextmanager
def staged_export(folder: Path) -> Iterator[Path]:
    """Yield the path of a hidden folder next to `folder`, which replaces it at the end, and is deleted on an error."""
    staged = folder.with_name(f".{folder.name}.unverified")
    try:
        yield staged
        with replace_folder(folder) as empty:
            staged.replace(empty)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def failed_folder(folder: Path) -> Path:
    """Return the name that a folder gets if it does not hold the trained model."""
    return folder.with_name(f"{folder.name}{FAILED_SUFFIX}")


def _refusal(folder: Path, problems: Iterable[str], *, aside: Path, is_wrong: bool) -> str:
    """Return the message; `is_wrong` is false where the folder may be right, as nothing has verified it."""
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    listed = "\n".join(f"  - {problem}" for problem in problems)
    verdict = "is not the model that was trained" if is_wrong else "could not be verified"
    return (
        f"export: the exported folder, loaded in a fresh process, {verdict}. It was renamed to {aside}; do not use it. "
        f"The checkpoints are unchanged.\n{listed}\n"
        "The same command exports and verifies again. If that fails, too, report it with the lines above; "
        "`export.verify: false` (`--no-verify`) writes the folder without verifying it."
    )


def _sentence(answer: Mapping[str, Any], *, num_rows: int, seconds: float) -> str:
    parts = []
    if answer["distance"] is not None:
        parts.append(f"logits of {num_rows} rows within {answer['distance']:.1g}")
    if answer.get("num_texts"):
        parts.append(f"the same tokens for {answer['num_texts']} texts")
    parts += answer["notes"]
    return f"verified in a fresh process in {seconds:.1f} s: {', '.join(parts or ['it loads'])}"


def _written_precision(report: ExportReport) -> Precision:
    """Return the narrowest type of the tensors."""
    dtypes = {tensor.dtype for tensor in (*report.tensors.values(), *report.adapter_tensors.values())}
    return "bfloat16" if torch.bfloat16 in dtypes else "float16" if torch.float16 in dtypes else "float32"


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    digests = map_in_threads(program.digest, tensors.values(), num_threads=num_threads_for())
    return {
        name: {"digest": digest, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    }


def _write_rows(path: Path, expected: Expected) -> None:
    tensors: dict[str, Tensor] = {}
    for number, row in enumerate(expected.rows):
        tensors |= {f"{number}/inputs/{name}": value.contiguous() for name, value in row.inputs.items()}
        if row.positions is not None:
            tensors[f"{number}/positions"] = row.positions
        if expected.logits is not None:
            tensors[f"{number}/logits"] = expected.logits[number].contiguous()
    save_file(tensors, path)
