"""A verified export outside a run: logits of the model in memory, in float32, are compared with the folder's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.sharding.state_layout import named_parameters
from finetune.config.sections.export import ExportSection
from finetune.export.card import CardFacts
from finetune.export.save import ExportReport, Preprocessors, export_model
from finetune.export.verify.rows import VerificationRow, expected_tokens, logits_of, synthetic_rows
from finetune.export.verify.verifier import Expected, ExportVerifier, model_facts, staged_export
from finetune.export.weights import unwrap_adapter
from finetune.model.adapters.context import has_adapter
from finetune.run.final_export import template_renders
from finetune.runtime.resources import available_bytes

_COPIES = 1.2
"""The memory of a forward pass in float32, as a multiple of the size of the weights."""


@dataclass(frozen=True)
class ModelToExport:
    """A model with the values of its weights, and the files written next to them."""

    model: Any
    weights: Mapping[str, Tensor]  # by canonical name
    preprocessors: Preprocessors
    section: ExportSection
    facts: CardFacts
    trust_remote_code: bool
    is_quantized: bool = False
    adapter_folder: Path | None = None  # with the adapter as it is loaded, where it is in one
    load_options: Mapping[str, Any] = field(default_factory=dict)  # with which the base of an adapter is found


def export_verified(source: ModelToExport, folder: Path, *, verify: bool, log: Callable[[str], None]) -> ExportReport:
    """Write a hidden folder, verify it, and rename it to `folder`; one that a killed command left is replaced.

    Raises ExportError for a folder that does not hold the same model; its name then ends in `.failed`.
    """
    if not verify:
        return _write(source, folder, section=source.section)
    facts = model_facts(
        source.model,
        head=source.facts.head,
        merge=source.section.merge,
        trust_remote_code=source.trust_remote_code,
        options=source.load_options,
    )
    with (
        ExportVerifier(facts, num_threads=torch.get_num_threads()) as verifier,
        TemporaryDirectory(prefix="finetune-unmerged-") as aside,
    ):
        unmerged = source.adapter_folder if _needs_unmerged(source) else None
        if unmerged is None and _needs_unmerged(source):
            section = source.section.model_copy(update={"merge": False, "dtype": None})
            unmerged = _write(source, Path(aside) / "adapter", section=section).folder
        with staged_export(folder) as staged:
            report = _write(source, staged, section=source.section, final=folder)
            log(verifier.check(report, _expected(source, unmerged=unmerged), final=folder))
    return replace(report, folder=folder)


def _write(source: ModelToExport, folder: Path, *, section: ExportSection, final: Path | None = None) -> ExportReport:
    return export_model(
        folder,
        model=source.model,
        weights=source.weights,
        preprocessors=source.preprocessors,
        section=section,
        facts=source.facts,
        final=final,
    )


def _needs_unmerged(source: ModelToExport) -> bool:
    """Return whether the program also compares the merge with base and adapter, to find errors that rounding hides."""
    if not (source.section.merge and has_adapter(source.model)):
        return False
    is_half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in source.weights.values())
    return source.is_quantized or is_half or source.section.dtype in ("bfloat16", "float16")


def _expected(source: ModelToExport, *, unmerged: Path | None) -> Expected:
    text, tokens = source.preprocessors.text, None
    if text is not None:
        tokenizer = text.tokenizer
        tokens = expected_tokens(tokenizer, (), renders=lambda turns: template_renders(tokenizer, turns))
    rows = _rows(source)
    logits = None
    if rows and not source.is_quantized:
        logits = logits_of(_with_values(source), rows, device=torch.device("cpu"))
    return Expected(rows, logits, "float32", tokens, text, unmerged)


def _rows(source: ModelToExport) -> tuple[VerificationRow, ...]:
    """Return synthetic rows; none if the model does not fit in memory, or its inputs cannot be synthesized."""
    size = sum(parameter.numel() for parameter in source.model.parameters()) * 4 * _COPIES
    inputs = source.preprocessors
    if size > available_bytes() or (inputs.text is None and inputs.processor is None):
        return ()
    start_id = getattr(unwrap_adapter(source.model).config, "decoder_start_token_id", None)
    return synthetic_rows(inputs, head=source.facts.head, start_id=start_id)


def _with_values(source: ModelToExport) -> Any:
    """Return the model in float32 with the exported values. Buffers are the model's own where none are exported."""
    model = source.model.float()
    tensors = dict(named_parameters(model)) | dict(model.named_buffers())
    for name, value in source.weights.items():
        if name in tensors and tensors[name].data_ptr() != value.data_ptr():
            tensors[name].data.copy_(value)
    return model
