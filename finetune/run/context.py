"""The context of every part of a run: its config, strategy, log and paths, frozen when the run starts."""

from dataclasses import dataclass
from pathlib import Path

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.report.reporter import RunLog
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.strategy.protocol import Strategy


@dataclass(frozen=True)
class RunContext:
    """Config, strategy and log of one run, the same from its start to its end, and its paths on this machine."""

    loaded: LoadedConfig
    strategy: Strategy
    log: RunLog

    @property
    def config(self) -> RunConfig:
        """Return the config, its paths absolute and a URL in `run.folder` replaced by the local folder."""
        return self.loaded.config

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.config.run.folder)

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.folder / CHECKPOINTS_FOLDER

    @property
    def final(self) -> Path:
        """Return the folder of the model that it exports at its end."""
        return self.folder / FINAL_FOLDER

    @property
    def stop_file(self) -> Path:
        """Return where a user puts a file that requests a stop."""
        return self.folder / "STOP"
