"""Verifies an export: a program in a fresh process loads the folder and compares it with the expected values."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from finetune.errors import ExportError
from finetune.export.save import REPLACED_IDS, ExportReport, TextPreprocessor, exported_file_problems, generation_config
from finetune.export.verify import program
from finetune.export.verify.rows import VerificationRow
from finetune.export.weights import build_meta_model, map_in_threads, num_threads_for, unwrap_adapter
from finetune.model.adapters.context import has_adapter
from finetune.model.loading.architecture import HEADS
from finetune.model.loading.hub import CONFIG
from finetune.model.loading.saved import CONFIG_FOLDER
from finetune.runtime.files.atomic import replace_folder
from finetune.runtime.resources import available_bytes

FAILED_SUFFIX = ".failed"
"""The suffix of a folder that failed verification; that of a run is `FAILED_FINAL_FOLDER`."""

_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_")
_LIBRARIES_BYTES = 1 << 30
_LIMIT_SECONDS, _BYTES_PER_SECOND = 1800.0, 10 << 20
"""The time limit of a verification: a constant plus the time to read the weights at this rate."""


Precision = Literal["float32", "tf32", "float16", "bfloat16"]

LIMITS: dict[Precision, float] = {"float32": 2e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 3e-2}
"""The maximum distance between the logits of two models, per square root of the depth.

The distance at a position is the norm of the difference relative to the norm of the logits. Rounding errors of layers
accumulate like a random walk, so the limit is `LIMITS[dtype] * sqrt(layers + 1)`: about 300 rounding errors in float32,
since other devices sum in another order, and 16 in the others. In float32, the worst position is compared. In lower
precision, where a mixture of experts may route a token to another expert, the median is.

A deep model with large weights may amplify rounding errors further. If tensors, files and settings of the folder are
correct but the distance is above the limit, twice the distance between the folder's own logits in float32 and in the
lower precision is allowed.
"""

_ORDER: tuple[Precision, ...] = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class Tolerance:
    """The largest distance that rounding can explain."""

    limit: float
    is_median: bool
    rule: str
    dtype: str  # with the rounding of the lowest precision
    of: str  # the reference for messages


def tolerance(*precisions: Precision, num_layers: int, of: str) -> Tolerance:
    """Return the tolerance for the lowest of the precisions in which logits or weights were computed.

    >>> tolerance("float32", num_layers=3, of="the trained model").limit
    4e-05
    """
    worst = max(precisions, key=_ORDER.index)
    limit = LIMITS[worst] * math.sqrt(num_layers + 1)
    rule = f"{LIMITS[worst]:g} x sqrt(layers + 1) for {worst}"
    return Tolerance(limit, worst != "float32", rule, "float16" if worst == "tf32" else worst, of)


@dataclass(frozen=True)
class ExpectedOutputs:
    """The expected results of the exported model, from the training."""

    rows: Sequence[VerificationRow] = ()
    logits: Sequence[Tensor] | None = None  # None if the trained model computes with quantized weights
    precision: Precision = "float32"  # of the logits
    tokens: Mapping[str, Any] | None = None  # from `expected_tokens`
    text: TextPreprocessor | None = None
    unmerged: Path | None = None  # a folder with the adapter before merging


@dataclass(frozen=True)
class ModelFacts:
    """The facts that the program needs to load the model."""

    head: str
    class_name: str
    is_adapter: bool
    uses_peft: bool  # also if the adapter was merged
    base: str | None  # of the adapter: a hub name or folder; None if it is in `base/`
    num_embeddings: int
    num_layers: int
    num_parameters: int
    config: str  # as JSON
    generation_config: GenerationConfig | None  # None if it does not generate text
    load_options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def model_facts(
    model: Any, *, head: str, merge: bool, trust_remote_code: bool, options: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Return the facts about an exported model; `options` are the arguments for loading its base."""
    base = unwrap_adapter(model)
    meta_model = build_meta_model(base, dtype=torch.float32)
    text_config = base.config.get_text_config()
    return ModelFacts(
        head=head,
        class_name=type(meta_model).__name__,
        is_adapter=has_adapter(model) and not merge,
        uses_peft=has_adapter(model),
        base=base.name_or_path or None,
        num_embeddings=int(getattr(text_config, "vocab_size", 0) or 0),
        num_layers=int(getattr(text_config, "num_hidden_layers", 0) or 12),
        num_parameters=sum(parameter.numel() for parameter in meta_model.parameters()),
        config=meta_model.config.to_json_string(),
        generation_config=getattr(base, "generation_config", None) if base.can_generate() else None,
        load_options=dict(options or {}),
        trust_remote_code=trust_remote_code,
    )


class ExportVerifier:
    """A fresh process that imports libraries while the folder is being written, and then verifies the folder."""

    def __init__(self, facts: ModelFacts, *, num_threads: int) -> None:
        self._facts = facts
        self._num_threads = num_threads
        self._folder = TemporaryDirectory(prefix="finetune-verify-")
        self._log = Path(self._folder.name) / "log.txt"
        imports = [HEADS[facts.head].__name__, "AutoTokenizer", facts.class_name]
        imports += ["peft"] if facts.uses_peft else []
        with self._log.open("wb") as log:
            self._process = start_program(imports, log=log.fileno())

    def __enter__(self) -> "ExportVerifier":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def check(self, report: ExportReport, expected: ExpectedOutputs, *, final: Path | None = None) -> str:
        """Return a sentence about the successful comparisons.

        Raises ExportError if the folder does not hold the trained model. It is then renamed to `final`, where the
        caller would have moved it, plus a suffix, so that it is not used by accident.
        """
        start = time.monotonic()
        request = self._request(report, expected)
        path = Path(self._folder.name) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        answer = self._answer(path, limit_seconds=_LIMIT_SECONDS + report.size_bytes / _BYTES_PER_SECOND)
        if answer["problems"]:
            failed = failed_folder(final or report.folder)
            is_verified = answer.get("is_complete", True)
            raise ExportError(_refuse(report.folder, answer["problems"], failed=failed, is_verified=is_verified))
        shutil.rmtree(failed_folder(final or report.folder), ignore_errors=True)  # of an earlier attempt
        parts = []
        if answer["distance"] is not None:
            parts.append(f"logits of {len(expected.rows)} rows within {answer['distance']:.1g}")
        if answer.get("num_texts"):
            parts.append(f"the same tokens for {answer['num_texts']} texts")
        parts += answer["notes"]
        return f"verified in a fresh process in {time.monotonic() - start:.1f} s: {', '.join(parts or ['it loads'])}"

    def _answer(self, request: Path, *, limit_seconds: float) -> dict[str, Any]:
        reason = ""
        try:
            self._process.communicate(f"{request}\n".encode(), timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            reason = f"no answer after {limit_seconds / 60:.0f} minutes"
        code = self._process.wait()
        answer = request.with_name(program.ANSWER)
        if not answer.is_file():
            lines = self._log.read_text(errors="replace").strip().splitlines()
            reason = reason or (f"signal {-code}" if code < 0 else f"exit code {code}")
            last_line = lines[-1][:300] if lines else "no output"
            return {"problems": [f"the process that loads it exited with {reason}: {last_line}"], "is_complete": False}
        values: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return values

    def _request(self, report: ExportReport, expected: ExpectedOutputs) -> dict[str, Any]:
        facts = self._facts
        dtypes = {tensor.dtype for tensor in (*report.tensors.values(), *report.adapter_tensors.values())}
        written: Precision = "float32"
        if torch.bfloat16 in dtypes or torch.float16 in dtypes:
            written = "bfloat16" if torch.bfloat16 in dtypes else "float16"
        num_copies = 1.6 if expected.unmerged is not None else 1.1  # of the float32 model; a merge loads the base, too
        fits = int(facts.num_parameters * 4 * num_copies) + _LIBRARIES_BYTES < available_bytes()
        rows = Path(self._folder.name) / "rows.safetensors" if expected.rows and fits else None
        if rows is not None:
            tensors: dict[str, Tensor] = {}
            for number, row in enumerate(expected.rows):
                tensors |= {f"{number}/inputs/{name}": value.contiguous() for name, value in row.inputs.items()}
                if row.positions is not None:
                    tensors[f"{number}/positions"] = row.positions
                if expected.logits is not None:
                    tensors[f"{number}/logits"] = expected.logits[number].contiguous()
            save_file(tensors, rows)
        limits = {
            "tolerance": tolerance(expected.precision, written, num_layers=facts.num_layers, of="the trained model's"),
            "merge_tolerance": tolerance(written, num_layers=facts.num_layers, of="base and adapter unmerged"),
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
            "problems": list(exported_file_problems(report.folder, report.files, self._settings(expected))),
            "tensors": _digests(report.tensors),
            "adapter_tensors": _digests(report.adapter_tensors),
            "only_tensors": not fits,
            "compares_logits": expected.logits is not None,
            "unmerged": None if expected.unmerged is None else str(expected.unmerged),
            "merged_dtype": written,
            **{name: vars(limit) for name, limit in limits.items()},
        }

    def _settings(self, expected: ExpectedOutputs) -> dict[str, str]:
        """Return the expected content of the folder's JSON files, serialized from the objects in memory."""
        facts, text = self._facts, expected.text
        files = {} if facts.is_adapter else {CONFIG: facts.config}
        if facts.generation_config is not None and text is not None:
            base, changed = facts.generation_config.to_diff_dict(), generation_config(facts.generation_config, text)
            values = {**base, **{name: getattr(changed, name) for name in REPLACED_IDS}}
            files[GENERATION_CONFIG_NAME] = json.dumps({key: it for key, it in values.items() if it is not None})
        if text is not None and (backend := getattr(text.tokenizer, "backend_tokenizer", None)) is not None:
            files[FULL_TOKENIZER_FILE] = backend.to_str()
        return files

    def _base(self, folder: Path, expected: ExpectedOutputs) -> dict[str, Any]:
        """Return the path of the adapter's base, and the config and embedding size with which to load it."""
        config = (expected.unmerged or folder) / CONFIG_FOLDER
        return {
            "path": self._facts.base,
            "options": dict(self._facts.load_options),
            "config": str(config) if config.is_dir() else None,
            "num_embeddings": self._facts.num_embeddings,
        }


def start_program(imports: Sequence[str], *, log: int) -> "subprocess.Popen[bytes]":
    """Start the program in a new interpreter without GPUs, outside the launcher's process group."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "USE_TORCH": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", str(program.__file__), *imports],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # signals to the run's process group must not reach it
    )


@contextmanager
def staged_export(folder: Path) -> Iterator[Path]:
    """Yield the path of a hidden folder next to `folder`, which replaces it at the end or is deleted on an error."""
    staged = folder.with_name(f".{folder.name}.unverified")
    try:
        yield staged
        with replace_folder(folder) as empty:
            staged.replace(empty)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def failed_folder(folder: Path) -> Path:
    """Return the new path of a folder that fails verification."""
    return folder.with_name(f"{folder.name}{FAILED_SUFFIX}")


def _refuse(folder: Path, problems: Iterable[str], *, failed: Path, is_verified: bool) -> str:
    """Rename the folder and return the message; `is_verified` is false if the verification itself failed."""
    shutil.rmtree(failed, ignore_errors=True)
    folder.rename(failed)
    listed = "\n".join(f"  - {problem}" for problem in problems)
    verdict = "differs from the trained model" if is_verified else "could not be verified"
    return (
        f"export: the exported folder {verdict} when loaded in a fresh process. It was renamed to {failed}; do not use "
        f"it. The checkpoints are unchanged.\n{listed}\n"
        "Run the same command to export and verify again. If that fails, too, report it with the lines above. "
        "`export.verify: false` (`--no-verify`) writes the folder without verifying it."
    )


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    digests = map_in_threads(program.digest, tensors.values(), num_threads=num_threads_for())
    return {
        name: {"digest": digest, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    }
