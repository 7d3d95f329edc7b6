"""The sweep as an Optuna study: each run is a trial, and a killed sweep continues from the journal.

A grid's runs are added as trials in the order of the grid. A search asks the tree-structured Parzen estimator
(Bergstra et al., 2011) for the values of the next run, and prunes by the median. Trial N depends on the seed, on N and
on the results before it, not on interruptions. Results are in the folders of the runs.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from finetune.commands.sweep.axes import Range, Space, Values, run_name, value_text
from finetune.commands.sweep.journal import LOCK_FILE, SweepJournal
from finetune.commands.sweep.results import PAGE, TRAIN_LOSS, Objective, history_so_far, measurements
from finetune.commands.sweep.runs import (
    FAILED,
    FINISHED,
    LOGS_FOLDER,
    PRUNED,
    RUNS_FOLDER,
    Outcome,
    RecordedRun,
    SweepRun,
    is_within,
    job_facts,
    outcome_of,
    point_key,
    read_status,
)
from finetune.config.formatting import truncate
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.history import RunHistory
from finetune.runtime.files.read import first_problem
from finetune.runtime.text.redact import comparable_config

JOURNAL_FILE, EARLIER_FILE = "sweep.journal", "sweep.json"
VERSION = 1

_NAME, _FACTS, _RUN = "sweep", "sweep", "run"
"""The study's name, and the user attributes of the study and of its trials."""

_OWN_FILES = (RUNS_FOLDER, LOGS_FOLDER, LOCK_FILE, JOURNAL_FILE, PAGE, "search.journal")

_NUM_RANDOM_TRIALS, _MIN_TRIALS_TO_PRUNE = 10, 4
"""Trials before the estimator is used, and complete trials before one is pruned."""


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True)
class SweepFacts:
    """The facts that all runs share; `facts` are the keys of the job that must not change, with values as JSON."""

    version: int
    job: str
    metric: str
    is_minimized: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    swept: tuple[str, ...] = ()
    former: Mapping[str, Any] = field(default_factory=dict)  # values of earlier runs for keys that were swept later


_STORED_FACTS, _STORED_RUN = TypeAdapter(SweepFacts), TypeAdapter(RecordedRun)


class SweepStudy:
    """The runs of a sweep, in memory and, once it is saved, in the journal, which is written at every change."""

    def __init__(self, folder: Path, *, space: Space, seed: int = 0) -> None:
        """Read the journal; raises UserError if it is damaged, or the folder has files of anything but a sweep."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        _require_sweep_folder(folder)
        self.folder, self._seed = folder, seed
        self.runs: dict[str, RecordedRun] = {}
        self.facts: SweepFacts | None = None
        self._trials: dict[str, int] = {}  # the number of each run's newest trial
        self._study: optuna.Study | None = None
        path = folder / JOURNAL_FILE
        try:
            self._journal = SweepJournal(path)
            self._storage = optuna.storages.JournalStorage(self._journal)
            if self._storage.get_all_studies():
                self._load()
        except Exception as error:  # replaying a damaged line can raise any error
            problem = first_problem(error) if isinstance(error, ValidationError) else f"{error or type(error).__name__}"
            raise UserError(
                f"{path}: the file is damaged: {problem}. Delete it: the same command finds the runs again by name."
            ) from error
        if self.facts is not None and self.facts.version != VERSION:
            raise UserError(
                f"{path}: was written by another version of finetune (format {self.facts.version}; this one reads "
                f"{VERSION}). Continue the sweep with that version, or choose another --folder."
            )
        self._set_space(space)

    @property
    def swept(self) -> tuple[str, ...]:
        """Return the keys that this call or an earlier one has swept."""
        return self.facts.swept if self.facts is not None else ()

    @property
    def names(self) -> dict[str, str]:
        """Return the name of each run by its point."""
        return {point_key(run.values): run.name for run in self.runs.values()}

    def begin(self, config: RunConfig, *, swept: Sequence[str], job: Path, objective: Objective) -> None:
        """Start or continue the study; raises UserError if it belongs to another job.

        Earlier runs keep their names, with their only value of keys that are swept for the first time.
        """
        if self.facts is None or self._study is None:
            facts = job_facts(config, swept=swept)
            direction = StudyDirection.MINIMIZE if objective.is_minimized else StudyDirection.MAXIMIZE
            self._study = optuna.create_study(storage=self._storage, study_name=_NAME, direction=direction)
            self._set_facts(
                SweepFacts(VERSION, str(job), objective.metric, objective.is_minimized, facts, tuple(swept))
            )
            return
        union = tuple(dict.fromkeys([*self.facts.swept, *swept]))
        facts_now = job_facts(config, swept=union)
        self.require_same_job(facts_now, swept=swept)
        added = {key: json.loads(self.facts.facts[key]) for key in swept if key in self.facts.facts}
        if union != self.facts.swept or facts_now != self.facts.facts:
            former = {**self.facts.former, **added}
            self._set_facts(replace(self.facts, facts=facts_now, swept=union, former=former))
        self.runs = {name: replace(run, values={**added, **run.values}) for name, run in self.runs.items()}

    def require_same_job(self, facts_now: Mapping[str, str], *, swept: Iterable[str]) -> None:
        """Raise UserError that names each key of the job that has changed since the sweep was started."""
        if self.facts is None:
            return
        varied = frozenset((*swept, *self.facts.swept))
        lines = []
        for key in sorted({*self.facts.facts, *facts_now}):
            before, now = self.facts.facts.get(key), facts_now.get(key)
            if before != now and not is_within(key, varied):
                lines.append(f"  {key}: {_shown(before)} then, {_shown(now)} now")
        if lines:
            raise UserError(
                f"{self.folder}: this sweep was started with another job:\n" + "\n".join(lines) + "\n"
                "Restore the values to continue it, sweep the key with --set, or choose another --folder."
            )

    def require_same_objective(self, objective: Objective) -> None:
        """Raise UserError if a search was started with another metric, whose values its trials have."""
        if objective != self.objective:
            raise UserError(
                f"--metric: this sweep was started with {self.objective.metric}, and a search continues with the same "
                f"metric. Write --metric {self.objective.metric}, or choose another --folder."
            )

    @property
    def objective(self) -> Objective:
        """Return the metric of the trials: that of the first call."""
        assert self.facts is not None
        return Objective(self.facts.metric, self.facts.is_minimized)

    def save(self) -> None:
        """Write the journal, and every later change; raises OSError. Record the runs that ended after a kill."""
        self._journal.save()
        for name, number in self._trials.items():
            if self._trial(number).state == TrialState.RUNNING:
                self._close_trial(name, self.outcome(name), history_so_far(self.folder / RUNS_FOLDER / name))

    def add(self, run: SweepRun) -> None:
        """Record a run unless the sweep has it."""
        if run.name not in self.runs:
            self._record(RecordedRun(run.name, run.values))

    def start(self, run: SweepRun, *, now: float) -> None:
        """Record that a process of the run is being started."""
        self._record(replace(self.runs[run.name], started=now, exit_code=None, message=None))

    def prune(self, run: SweepRun) -> None:
        """Record that the run is pruned: it is not continued."""
        self._record(replace(self.runs[run.name], is_pruned=True))

    def end(self, run: SweepRun, history: RunHistory, *, exit_code: int, message: str | None = None) -> Outcome:
        """Record the exit of the run's process, and return the run's outcome."""
        self._record(replace(self.runs[run.name], exit_code=exit_code, message=message))
        outcome = self.outcome(run.name)
        self._close_trial(run.name, outcome, history)
        return outcome

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a run, from its own files and its record."""
        return outcome_of(read_status(self.folder / RUNS_FOLDER / name), self.runs[name])

    def propose(self) -> tuple[str, Values]:
        """Return the name and the values of the next run of a search."""
        assert self._study is not None
        number = len(self.runs)
        digest = hashlib.sha256(f"{self._seed}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")  # for this trial only, so an interruption has no effect
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_NUM_RANDOM_TRIALS)
        trial = self._study.ask({self._labels[key]: self._distributions[key] for key in self.space})
        values = {}
        for key, domain in self.space.items():
            value = trial.params[self._labels[key]]
            if not isinstance(domain, Range):
                value = next(choice for choice in domain.values if value_text(choice) == value)
            values[key] = value
        name = trial_name(values, number)
        self._trials[name] = trial.number
        self._record(RecordedRun(name, values))
        return name, values

    def should_prune(self, name: str, history: RunHistory) -> bool:
        """Return whether the run is worse than the median of the others at the step of its last evaluation."""
        assert self._study is not None
        if self.objective.metric == TRAIN_LOSS or not measurements(history, self.objective.metric):
            return False
        self._report(name, history)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=_MIN_TRIALS_TO_PRUNE)
        return pruner.prune(self._study, self._trial(self._trials[name]))

    def _load(self) -> None:
        self._study = optuna.load_study(storage=self._storage, study_name=_NAME)
        self.facts = _STORED_FACTS.validate_json(json.dumps(self._study.user_attrs[_FACTS]))
        for trial in self._study.get_trials(deepcopy=False):
            if _RUN in trial.user_attrs:  # otherwise the sweep was killed while choosing the values
                run = _STORED_RUN.validate_json(json.dumps(trial.user_attrs[_RUN]))
                if run.name in ("", "..") or Path(run.name).name != run.name:
                    raise ValueError(f"`{truncate(run.name)}` is not the name of a run")
                self.runs[run.name] = replace(run, values={**self.facts.former, **run.values})
                self._trials[run.name] = trial.number

    def _set_facts(self, facts: SweepFacts) -> None:
        assert self._study is not None
        self.facts = facts
        self._study.set_user_attr(_FACTS, asdict(facts))

    def _set_space(self, space: Space) -> None:
        """Name the parameters: a key with changed choices or scale gets a new name.

        Optuna refuses two such distributions under one name, but allows new bounds of a range.
        """
        self.space = space
        self._distributions = {key: _distribution(domain) for key, domain in space.items()}
        trials = self._study.get_trials(deepcopy=False) if self._study is not None else []
        self._labels = {}
        for key, distribution in self._distributions.items():
            names = itertools.chain([key], (f"{key} ({number})" for number in itertools.count(2)))
            self._labels[key] = next(
                name
                for name in names
                if all(_is_compatible(trial.distributions.get(name), distribution) for trial in trials)
            )

    def _record(self, run: RecordedRun) -> None:
        """Update the record; a run that is started again after its trial has ended gets a new trial."""
        assert self._study is not None
        self.runs[run.name] = run
        stored = {**asdict(run), "values": comparable_config(run.values)}
        number = self._trials.get(run.name)
        if number is not None and not self._trial(number).state.is_finished():
            self._storage.set_trial_user_attr(self._trial_id(number), _RUN, stored)
            return
        labels = {key: self._labels[key] for key, domain in self.space.items() if run.values.get(key, _NONE) in domain}
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={label: self._parameter(key, run.values[key]) for key, label in labels.items()},
            distributions={label: self._distributions[key] for key, label in labels.items()},
            user_attrs={_RUN: stored},
        )
        self._study.add_trial(trial)
        self._trials[run.name] = len(self._study.get_trials(deepcopy=False)) - 1

    def _parameter(self, key: str, value: Any) -> Any:
        return value if isinstance(self.space[key], Range) else value_text(value)

    def _close_trial(self, name: str, outcome: Outcome, history: RunHistory) -> None:
        """End the run's trial, unless the run can be continued."""
        assert self._study is not None
        if outcome.state not in (FINISHED, PRUNED, FAILED):
            return
        self._report(name, history)
        measured = measurements(history, self.objective.metric)
        value = measured[-1][1] if measured else math.nan
        if outcome.state == PRUNED:
            self._study.tell(self._trials[name], state=TrialState.PRUNED)
        elif outcome.state == FAILED or math.isnan(value):
            self._study.tell(self._trials[name], state=TrialState.FAIL)
        else:
            self._study.tell(self._trials[name], value)

    def _report(self, name: str, history: RunHistory) -> None:
        trial = self._trial(self._trials[name])
        for step, value in measurements(history, self.objective.metric):
            if step not in trial.intermediate_values:
                self._storage.set_trial_intermediate_value(self._trial_id(trial.number), step, value)

    def _trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(
            self._storage.get_study_id_from_name(_NAME), number
        )


_NONE = object()


def trial_name(values: Values, number: int) -> str:
    """Return the name of a run of a search: its number, and its values with four digits.

    >>> trial_name({"train.learning_rate": 0.00012345678}, 3)
    '003,learning_rate=0.0001235'
    """
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
    return f"{number:03d},{run_name(rounded)}"


def _distribution(domain: Any) -> BaseDistribution:
    if not isinstance(domain, Range):
        return CategoricalDistribution([value_text(value) for value in domain.values])
    if domain.is_whole:
        return IntDistribution(int(domain.low), int(domain.high), log=domain.is_log)
    return FloatDistribution(domain.low, domain.high, log=domain.is_log)


def _is_compatible(before: BaseDistribution | None, now: BaseDistribution) -> bool:
    if before is None or before == now:
        return True
    if isinstance(before, CategoricalDistribution) or type(before) is not type(now):
        return False
    return bool(getattr(before, "log", None) == getattr(now, "log", None))


def _shown(text: str | None) -> str:
    return "not set" if text is None else f"`{truncate(text)}`"


def _require_sweep_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder: {folder} is not a folder. Choose another.")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if JOURNAL_FILE in names:
        return
    if EARLIER_FILE in names:
        raise UserError(
            f"{folder / EARLIER_FILE}: this sweep was written by an earlier version of finetune. Delete the file: the "
            "same command finds the runs again by name, and does not repeat those that are finished. Or choose "
            "another --folder."
        )
    foreign = [name for name in names if name not in _OWN_FILES and not name.startswith((".", "prepare"))]
    if foreign:
        raise UserError(
            f"--folder: {folder} is not the folder of a sweep: it has `{truncate(foreign[0])}` and no {JOURNAL_FILE}. "
            "Choose a new folder, or that of the sweep to continue."
        )
