"""The teacher of a distillation: a causal model that answers and never learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune.config.sections.model import ModelSection
from finetune.config.sections.task import DistillationSection
from finetune.errors import ModelError
from finetune.model.base import folder_digest
from finetune.model.hub import is_folder, located, told
from finetune.model.pretrained import load_settings, load_weights, refuse_missing
from finetune.runtime.hub import is_offline, without_vain_retries

KEY = "task.distillation.teacher"


def load_teacher(
    section: DistillationSection, *, model: ModelSection, vocabulary_size: int, device: torch.device
) -> PreTrainedModel:
    """Return the teacher on the device, frozen and in evaluation mode, in the type asked for; raises ModelError."""
    with told(section.teacher, key=KEY), without_vain_retries(is_local=is_folder(section.teacher)):
        origin = _origin(section, model)
        config = load_settings(AutoConfig, **origin)
        dtype = getattr(torch, section.teacher_dtype)
        teacher: PreTrainedModel
        teacher, loading = load_weights(
            AutoModelForCausalLM, **origin, config=config, dtype=dtype, output_loading_info=True
        )
        refuse_missing(loading, section.teacher, key=KEY)
    size = teacher.config.get_text_config().vocab_size
    if size < vocabulary_size:
        raise ModelError(
            f"{KEY}: `{section.teacher}` knows {size} tokens and the student's tokenizer has {vocabulary_size}. A "
            "teacher and its student share one tokenizer: name another teacher, or train on its tokenizer."
        )
    return teacher.requires_grad_(False).eval().to(device)


def check_vocabulary(section: DistillationSection, *, model: ModelSection, tokenizer: Any) -> None:
    """Raise ModelError unless the teacher's tokenizer gives every token the number that the student's gives it."""
    with told(section.teacher, key=KEY), without_vain_retries(is_local=is_folder(section.teacher)):
        theirs = load_settings(AutoTokenizer, **_origin(section, model)).get_vocab()
    ours = tokenizer.get_vocab()
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        raise ModelError(
            f"{KEY}: the tokenizer of `{section.teacher}` is not the student's: {len(different)} tokens differ, such "
            f"as {different[0]!r}. Their probabilities cannot be compared; name a teacher of the same family, or write "
            f"`model.tokenizer: {{name: {section.teacher}}}` for a student that is trained from random weights."
        )


def teacher_digest(section: DistillationSection, *, model: ModelSection, say: Callable[[str], None]) -> str:
    """Return what identifies the teacher's weights: a digest of a folder's, the commit of a hub model's in the cache.

    Reads every byte of a folder's weights: call it on one rank.
    """
    if is_folder(section.teacher):
        return folder_digest(Path(located(section.teacher, key=KEY)), say=say)
    path = try_to_load_from_cache(section.teacher, "config.json", cache_dir=model.cache_folder)
    if not isinstance(path, str):
        say(f"{KEY}: the commit of `{section.teacher}` is not known, so a change of it would not be seen on a resume")
        return "commit unknown"
    return f"commit {Path(path).parent.name}"


def _origin(section: DistillationSection, model: ModelSection) -> dict[str, Any]:
    return {
        "place": located(section.teacher, key=KEY),
        "cache_dir": model.cache_folder,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": is_folder(section.teacher) or is_offline(),
    }
