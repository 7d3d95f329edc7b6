"""The sweep as an Optuna study: each run is a trial, and a killed sweep continues from the journal.

A grid's runs are added as trials in the order of the grid; Optuna's GridSampler would shuffle them, and repeat them all
when values are added. A search asks the tree-structured Parzen estimator (Bergstra et al., 2011) for the values of the
next run. Trial N depends on the seed, on N and on the results before it, not on interruptions. Results are in the
folders of the runs.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState
from pydantic import TypeAdapter

from finetune.commands.sweep.axes import Distribution, Space, contains, run_name, value_text
from finetune.commands.sweep.results import Objective, history_so_far, measurements
from finetune.commands.sweep.runs import (
    FAILED,
    FINISHED,
    RUNS_FOLDER,
    RecordedRun,
    RunOutcome,
    SweepRun,
    job_facts,
    outcome_of,
)
from finetune.config.formatting import format_list, truncate
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.runtime.files.read import parse_as, parse_json, read_regular
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.redact import comparable_config

JOURNAL_FILE, LOCK_FILE = "sweep.journal", ".sweep.lock"

_NAME, _FACTS, _RUN = "sweep", "sweep", "run"
"""The study's name, and the user attributes of the study and of its trials."""

_NUM_RANDOM_TRIALS = 10
"""Trials before the estimator is used."""


@dataclass(frozen=True)
class SweepFacts:
    """What no later call may change; `facts` are the keys of the first call's job, with values as JSON."""

    metric: str
    is_minimized: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    swept: tuple[str, ...] = ()


_STORED_FACTS, _STORED_RUN = TypeAdapter(SweepFacts), TypeAdapter(RecordedRun)


class SweepStudy:
    """The runs of a sweep, in memory and in the journal, which is written at every change."""

    def __init__(self, folder: Path, *, space: Space, seed: int = 0) -> None:
        """Open the journal, which is created; raises UserError if it is damaged."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.space, self._seed = folder, space, seed
        self.runs: dict[str, RecordedRun] = {}
        self._open_trials: dict[str, optuna.Trial] = {}  # of runs that have not ended, or can be continued
        self._facts: SweepFacts | None = None
        path = folder / JOURNAL_FILE
        try:
            if path.exists():
                content = read_regular(path)
                size = content.rfind(b"\n") + 1
                for line in content[:size].splitlines():
                    parse_json(line)  # Optuna skips the last line if it is damaged
                os.truncate(path, size)  # a line that a kill has cut off
            self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
            self._load()
        except Exception as error:  # replaying a damaged line can raise any error
            raise UserError(
                f"{path}: the file is damaged: {error or type(error).__name__}. Delete it: the same command finds the "
                "runs again by name."
            ) from error

    @property
    def facts(self) -> SweepFacts:
        """Return the facts of a sweep that has begun."""
        assert self._facts is not None
        return self._facts

    def begin(self, config: RunConfig, *, objective: Objective, is_search: bool = False) -> None:
        """Start or continue the study; raises UserError if it has another job or other keys, a search another metric.

        Runs that have ended since the sweep was killed are recorded.
        """
        swept = tuple(self.space)
        is_new = self._facts is None
        before = self._facts or SweepFacts(
            objective.metric, objective.is_minimized, job_facts(config, swept=swept), swept
        )
        self._facts = before
        if set(swept) != set(before.swept):
            raise UserError(
                f"{self.folder}: this sweep was started with several values of "
                f"{format_list(before.swept) or 'no key'}. Sweep the same keys, or choose another --folder."
            )
        self.require_same_job(config)
        if is_search and objective != Objective(before.metric, before.is_minimized):
            raise UserError(
                f"--metric: this sweep was started with {before.metric}, and a search continues with the same metric. "
                f"Write --metric {before.metric}, or choose another --folder."
            )
        direction = StudyDirection.MINIMIZE if before.is_minimized else StudyDirection.MAXIMIZE
        self._study = optuna.create_study(
            storage=self._storage, study_name=_NAME, direction=direction, load_if_exists=True
        )
        if is_new:
            self._study.set_user_attr(_FACTS, asdict(before))
        for name in list(self._open_trials):
            self._close_trial(name, self.outcome(name))

    def require_same_job(self, config: RunConfig) -> None:
        """Raise UserError that names each key of the job that has changed since the sweep was started."""
        before, now = self.facts.facts, job_facts(config, swept=self.facts.swept)
        lines = [
            f"  {key}: {_shown(before.get(key))} then, {_shown(now.get(key))} now"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if lines:
            raise UserError(
                f"{self.folder}: this sweep was started with another job:\n" + "\n".join(lines) + "\n"
                "Restore the values to continue it, sweep the key with --set, or choose another --folder."
            )

    def add(self, run: SweepRun) -> None:
        """Record a run unless the sweep has it."""
        if run.name not in self.runs:
            self._record(RecordedRun(run.name, run.values))

    def start(self, run: SweepRun) -> None:
        """Record that a process of the run is being started."""
        self.add(run)
        record = self.runs[run.name]
        if record.error is not None or run.name not in self._open_trials:
            self._record(replace(record, error=None))

    def end(self, run: SweepRun, *, error: str | None = None) -> RunOutcome:
        """Record that the run's process has ended, and with which error if its own files do not say so."""
        if error is not None:
            self._record(replace(self.runs[run.name], error=error))
        outcome = self.outcome(run.name)
        self._close_trial(run.name, outcome)
        return outcome

    def outcome(self, name: str) -> RunOutcome:
        """Return the outcome of a run, from its own files and its record."""
        return outcome_of(read_status(self.folder / RUNS_FOLDER / name), self.runs[name])

    def propose(self) -> RecordedRun:
        """Return the next run of a search."""
        number = len(self.runs)
        digest = hashlib.sha256(f"{self._seed}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")  # for this trial only, so an interruption has no effect
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_NUM_RANDOM_TRIALS)
        trial = self._study.ask({_parameter(key, domain): domain for key, domain in self.space.items()})
        values = {}
        for key, domain in self.space.items():
            value = trial.params[_parameter(key, domain)]
            values[key] = json.loads(value) if isinstance(domain, CategoricalDistribution) else value
        rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
        name = f"{number:03d},{run_name(rounded)}"
        self._open_trials[name] = trial
        self._record(RecordedRun(name, values))
        return self.runs[name]

    def _load(self) -> None:
        studies = self._storage.get_all_studies()
        if not studies or _FACTS not in studies[0].user_attrs:  # it was killed while creating the study
            return
        self._study = optuna.load_study(storage=self._storage, study_name=_NAME)
        self._facts = parse_as(_STORED_FACTS, json.dumps(self._study.user_attrs[_FACTS]).encode())
        for trial in self._study.get_trials(deepcopy=False):
            if _RUN not in trial.user_attrs:  # the sweep was killed while choosing the values
                continue
            run = parse_as(_STORED_RUN, json.dumps(trial.user_attrs[_RUN]).encode())
            if run.name in ("", "..") or Path(run.name).name != run.name:
                raise ValueError(f"`{truncate(run.name)}` is not the name of a run")
            self.runs[run.name] = run
            if not trial.state.is_finished():
                self._open_trials[run.name] = optuna.Trial(self._study, trial._trial_id)

    def _record(self, run: RecordedRun) -> None:
        """Update the record; a run that is started again after its trial has ended gets a new trial."""
        self.runs[run.name] = run
        stored = {**asdict(run), "values": comparable_config(run.values)}
        if run.name in self._open_trials:
            self._open_trials[run.name].set_user_attr(_RUN, stored)
            return
        params: dict[str, Any] = {}
        distributions: dict[str, BaseDistribution] = {}
        for key, domain in self.space.items():
            if key in run.values and contains(domain, run.values[key]):
                value, name = run.values[key], _parameter(key, domain)
                params[name] = value_text(value) if isinstance(domain, CategoricalDistribution) else value
                distributions[name] = domain
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs={_RUN: stored}
        )
        study_id = self._storage.get_study_id_from_name(_NAME)
        trial_id = self._storage.create_new_trial(study_id, template_trial=trial)
        self._open_trials[run.name] = optuna.Trial(self._study, trial_id)

    def _close_trial(self, name: str, outcome: RunOutcome) -> None:
        """End the run's trial, unless the run can be continued."""
        if outcome.state not in (FINISHED, FAILED):
            return
        trial = self._open_trials.pop(name)
        measured = measurements(history_so_far(self.folder / RUNS_FOLDER / name), self.facts.metric)
        value = measured[-1][1] if measured else math.nan
        if outcome.state == FAILED or math.isnan(value):
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def _parameter(key: str, domain: Distribution) -> str:
    """Return Optuna's name for the key: it refuses other choices, or another scale, under the same name."""
    if isinstance(domain, CategoricalDistribution):
        return f"{key}: {', '.join(map(str, domain.choices))}"
    return f"{key}: {type(domain).__name__}, {'log' if domain.log else 'linear'}"


def _shown(text: str | None) -> str:
    return "not set" if text is None else f"`{truncate(text)}`"


@contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Hold the sweep's folder, which is created; raises UserError if another sweep holds it."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"--folder: another `finetune sweep` is running in {folder}. Wait for it, or choose another folder."
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--folder: {folder} cannot be written: {reason}. Choose another folder.") from error
    try:
        yield
    finally:
        lock.release()
