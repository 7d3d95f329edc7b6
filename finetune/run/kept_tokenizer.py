"""The tokenizer that a run keeps in its folder, so that an export of a checkpoint needs none of the run's data."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import UserError
from finetune.export.folder import replaced

FOLDER = "tokenizer"


def keep_tokenizer(run: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer, its chat template included, into the run's folder, whole or not at all. On one process."""
    with replaced(run / FOLDER) as staging:
        tokenizer.save_pretrained(staging)


def load_kept_tokenizer(run: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the run has kept; raises UserError where there is none."""
    folder = run / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is not there. A run writes its tokenizer down when it starts; start the job once more (with "
            "`checkpoint.resume: auto` it goes on from where it is), or copy the tokenizer's files there."
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: holds no tokenizer that can be loaded: {error}") from error
