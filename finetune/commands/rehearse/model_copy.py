"""A folder with the small model: random weights, and everything but the weights of the real one's folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download

from finetune.commands.rehearse.architecture import Architecture, build_small
from finetune.config.sections.model import ModelSection
from finetune.model.adapters.context import AdapterContext
from finetune.model.loading.architecture import pretrained_arguments
from finetune.model.loading.hub import is_local_path, loading_errors
from finetune.runtime.optional import lazily

with lazily():  # peft
    from finetune.model.adapters import build as adapters

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".index.json", ".npz")
MAX_FILE_BYTES = 256 << 20
_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "1_*/*.json", "2_*/*.json"]


def write_model_copy(
    architecture: Architecture, section: ModelSection, *, head: str, folder: Path, seed: int = 0
) -> None:
    """Write the folder; raises ModelError where the real one's files cannot be had."""
    model = build_small(architecture.config, section, head=_saved_head(architecture, head), seed=seed)
    model.save_pretrained(folder)
    source = _source_folder(section)
    for path in _small_files(source):
        target = folder / path.relative_to(source)
        if target.name != "config.json" or target.parent != folder:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _saved_head(architecture: Architecture, head: str) -> str:
    """Return the head that the real weights have: the job's, but a language model's under a new classifier's."""
    named = (architecture.config.architectures or [""])[0]
    known = {"ForCausalLM": "causal_lm", "ForMaskedLM": "masked_lm", "LMHeadModel": "causal_lm"}
    return next((found for end, found in known.items() if named.endswith(end)), head)


def _source_folder(section: ModelSection) -> Path:
    origin = pretrained_arguments(section)
    if is_local_path(str(section.name)):
        return Path(origin["place"])
    with loading_errors(str(section.name), key="model.name"):
        return Path(
            snapshot_download(
                origin["place"],
                revision=section.revision,
                cache_dir=section.cache_folder,
                allow_patterns=_FILES,
                local_files_only=origin["local_files_only"],
            )
        )


def _small_files(folder: Path) -> Iterator[Path]:
    for path in sorted([*folder.glob("*"), *folder.glob("[!.]*/*.json"), *folder.glob("additional_chat_templates/*")]):
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.stat().st_size <= MAX_FILE_BYTES:
            yield path


def write_new_adapter(
    section: ModelSection, architecture: Architecture, *, base: Path, head: str, folder: Path
) -> None:
    """Write an adapter like that of `model.adapter`, with new values, for the small model."""
    model = build_small(architecture.config, section, head=head)
    real = Path(str(section.adapter))
    context = AdapterContext(seed=0, head=head, base=str(base))
    adapters.save_untrained_copy(model, real, context, folder=folder)
    for path in _small_files(real):
        if path.name != "adapter_config.json":
            shutil.copyfile(path, folder / path.name)
