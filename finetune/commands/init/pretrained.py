"""`finetune init quickstart --model`: the quickstart for a pretrained model, with settings that suit it."""

from pathlib import Path

import torch

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError, UserError
from finetune.migration.complete import locate
from finetune.migration.draft import yaml_value
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.tokenizer import load_tokenizer
from finetune.runtime.optional import no_op
from finetune.runtime.text.terminal import quiet_libraries

RECIPE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RECIPE_RATE, LARGE_MODEL_RATE = "1e-3", "2e-4"
_LARGE_HIDDEN_SIZE = 1024
"""Hidden size from which a model has about half a billion weights and trains better at the smaller rate."""


def pretrained_job(recipe: str, written: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the recipe's text for this hub name or folder, and by name what was chosen for the model.

    Reads its config and tokenizer, no weights. Raises UserError if they cannot be loaded.
    """
    quiet_libraries(is_main=True)
    name = locate(written, Path.cwd())
    try:
        section = ModelSection(name=name)
        config = load_pretrained_config(section)
        tokenizer = load_tokenizer(section, texts=list, cache_folder=Path(), log=no_op)
    except ModelError as error:
        raise UserError(f"--model {written}: {error}") from error
    job = recipe.replace(f"name: {RECIPE_MODEL}", f"name: {yaml_value(name)}")
    facts = [("chat template", "the model's own")]
    if tokenizer.chat_template is None:
        job = job.replace("# chat_template:", "chat_template:")
        facts = [("chat template", "chatml, because the model has none")]
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        job = job.replace("# dtype:", "dtype:").replace("# precision:", "precision:")
        facts.append(("precision", "bf16, because this machine has a GPU"))
    else:
        facts.append(("precision", "float32, because this machine has no GPU that computes in bfloat16"))
    rate = RECIPE_RATE
    if (getattr(config.get_text_config(), "hidden_size", 0) or 0) >= _LARGE_HIDDEN_SIZE:
        rate = LARGE_MODEL_RATE
        job = job.replace(f"learning_rate: {RECIPE_RATE}", f"learning_rate: {rate}")
    return job, [*facts, ("learning rate", rate)]
