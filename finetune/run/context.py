"""The context of every part of a run: its config, strategy, log and paths, frozen when the run starts."""

from dataclasses import dataclass
from pathlib import Path

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.report.reporter import RunLog
from finetune.runtime import distributed
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER
from finetune.strategy.protocol import Strategy


@dataclass(frozen=True)
class RunPaths:
    """The paths that a run writes on this machine."""

    folder: Path

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


@dataclass(frozen=True)
class RunContext:
    """Config, strategy, log and paths of one run, the same from its start to its end."""

    loaded: LoadedConfig
    strategy: Strategy
    log: RunLog
    paths: RunPaths

    @property
    def config(self) -> RunConfig:
        """Return the config, its paths absolute and a URL in `run.folder` replaced by the local folder."""
        return self.loaded.config


def make_context(loaded: LoadedConfig, strategy: Strategy) -> RunContext:
    """Return the context of a run on this rank; its log prints on rank 0 alone."""
    log = RunLog(is_main=distributed.is_main())
    return RunContext(loaded, strategy, log, RunPaths(Path(loaded.config.run.folder)))
