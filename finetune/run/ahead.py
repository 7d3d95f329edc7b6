"""What a run continues from is digested from its first moment on, while the packages that train are being imported."""

from pathlib import Path

from finetune.checkpoint.ahead import Ahead, begin_ahead
from finetune.checkpoint.layout import CHECKPOINTS
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url


def verify_ahead(loaded: LoadedConfig) -> Ahead | None:
    """Begin to digest what the run will verify; None where its folder is a bucket, which must be fetched first."""
    config = loaded.config
    if is_url(config.run.folder):
        return None
    return begin_ahead(Path(config.run.folder) / CHECKPOINTS, resume=config.checkpoint.resume)
