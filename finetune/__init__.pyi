"""The names of the package, for type checkers and editors: `__init__.py` imports some of them when first used."""

from finetune import register as register
from finetune.api.commands import check as check
from finetune.api.commands import evaluate as evaluate
from finetune.api.commands import export as export
from finetune.api.commands import generate as generate
from finetune.api.commands import prepare as prepare
from finetune.api.job import Job as Job
from finetune.api.job import load_job as load_job
from finetune.api.session import Session as Session
from finetune.api.training import train as train
from finetune.errors import CheckpointError as CheckpointError
from finetune.errors import ConfigError as ConfigError
from finetune.errors import DataError as DataError
from finetune.errors import DiskError as DiskError
from finetune.errors import ExportError as ExportError
from finetune.errors import FinetuneError as FinetuneError
from finetune.errors import Hang as Hang
from finetune.errors import HubError as HubError
from finetune.errors import LostContact as LostContact
from finetune.errors import MissingPackage as MissingPackage
from finetune.errors import ModelError as ModelError
from finetune.errors import NonFiniteError as NonFiniteError
from finetune.errors import RegistryError as RegistryError
from finetune.errors import StrategyError as StrategyError
from finetune.errors import TrainingError as TrainingError
from finetune.errors import UserError as UserError
from finetune.run.state.finished import RunResult as RunResult

__version__: str
