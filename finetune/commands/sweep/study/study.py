"""A search with Optuna: the tree-structured Parzen estimator (Bergstra et al., 2011) and pruning by the median.

The truth about a search is in `sweep.json` and in the folders of its runs: at each start the study is built anew from
them, so a kill loses nothing. `search.journal` is written for `optuna-dashboard`. What is tried as trial N depends on
the seed, on N and on the results before it, not on how often the search was interrupted.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.commands.sweep.plan.axes import value_text
from finetune.commands.sweep.plan.grid import Values
from finetune.commands.sweep.plan.names import run_name
from finetune.commands.sweep.results.ranking import Objective, RunResult
from finetune.commands.sweep.running.history import TRAIN_LOSS, RunHistory
from finetune.commands.sweep.state.outcome import FAILED, FINISHED, PRUNED, STOPPED
from finetune.commands.sweep.study.space import Choices, Range, Space, is_inside
from finetune.runtime.optional import require

JOURNAL = "search.journal"


class SearchStudy:
    """Chooses values of the next run and gives up runs that are worse than the median of those before."""

    def __init__(self, space: Space, objective: Objective, *, seed: int, folder: Path) -> None:
        """Raises MissingPackage where Optuna is not installed."""
        self._optuna: Any = require("optuna", extra="search", purpose="`finetune sweep --search`")
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        self._space, self._objective, self._seed = space, objective, seed
        self._distributions = {key: self._distribution(each) for key, each in space.items()}
        journal = folder / JOURNAL
        journal.unlink(missing_ok=True)
        backend = self._optuna.storages.journal.JournalFileBackend(str(journal))
        self._study = self._optuna.create_study(
            storage=self._optuna.storages.JournalStorage(backend),
            study_name="sweep",
            direction="minimize" if objective.is_minimized else "maximize",
            pruner=self._optuna.pruners.MedianPruner(n_startup_trials=_FEWEST_TO_PRUNE),
        )
        self._trials: dict[str, Any] = {}  # of the runs that are not over, by name

    @property
    def num_trials(self) -> int:
        """Return how many runs the search has begun."""
        return len(self._study.get_trials(deepcopy=False))

    def restore(self, result: RunResult, history: RunHistory, *, is_due: bool) -> None:
        """Add a run of an earlier call, to be continued where it is due; one of another space is only counted."""
        is_known = is_inside(result.values, self._space)
        known = {key: self._parameter(key, value) for key, value in result.values.items()} if is_known else {}
        if is_due and is_known:
            self._study.enqueue_trial(known)
            self._trials[result.name] = self._new_trial()
            return
        state, value = self._verdict(result)
        if not is_known:
            state, value = self._optuna.trial.TrialState.FAIL, None
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                value=value,
                params=known,
                distributions={key: self._distributions[key] for key in known},
                intermediate_values=dict(history.metric(self._objective.metric)) if is_known else {},
            )
        )

    def is_open(self, name: str) -> bool:
        """Tell whether the run is one of the search that is to be continued."""
        return name in self._trials

    def next_trial(self) -> tuple[str, Values]:
        """Return the name and the values of the next run."""
        trial = self._new_trial()
        values = {key: self._value(key, trial.params[key]) for key in self._space}
        name = trial_name(values, trial.number)
        self._trials[name] = trial
        return name, values

    def is_hopeless(self, name: str, history: RunHistory) -> bool:
        """Tell whether the run is worse than the median of the others at the step of its last evaluation."""
        measured = [] if self._objective.metric == TRAIN_LOSS else history.metric(self._objective.metric)
        trial = self._trials[name]
        self._report(trial, measured)
        return bool(measured) and bool(trial.should_prune())

    def end(self, result: RunResult, history: RunHistory) -> None:
        """Learn what the run has reached; one that was interrupted stays open."""
        was_signalled = result.outcome.message.startswith("signal")
        if result.outcome.state not in (FINISHED, STOPPED, PRUNED, FAILED) or was_signalled:
            return
        trial = self._trials.pop(result.name)
        self._report(trial, history.metric(self._objective.metric))
        state, value = self._verdict(result)
        self._study.tell(trial, value, state=state)

    def _verdict(self, result: RunResult) -> tuple[Any, float | None]:
        """Return what Optuna calls such an end, and the value where there is one."""
        states = self._optuna.trial.TrialState
        if result.outcome.state == PRUNED:
            return states.PRUNED, None
        if result.outcome.state == FAILED or result.final is None or math.isnan(result.final):
            return states.FAIL, None
        return states.COMPLETE, result.final

    def _new_trial(self) -> Any:
        """Return a new trial; its sampler is seeded by its number, so that an interruption changes nothing."""
        digest = hashlib.sha256(f"{self._seed}:{self.num_trials}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
        return self._study.ask(self._distributions)

    def _report(self, trial: Any, measured: Sequence[tuple[int, float]]) -> None:
        reported = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in measured:
            if step not in reported:
                trial.report(value, step)

    def _distribution(self, each: Range | Choices) -> Any:
        distributions = self._optuna.distributions
        if isinstance(each, Choices):
            return distributions.CategoricalDistribution([value_text(value) for value in each.values])
        if each.is_whole:
            return distributions.IntDistribution(int(each.low), int(each.high), log=each.is_log)
        return distributions.FloatDistribution(each.low, each.high, log=each.is_log)

    def _parameter(self, key: str, value: Any) -> Any:
        return value_text(value) if isinstance(self._space[key], Choices) else value

    def _value(self, key: str, parameter: Any) -> Any:
        each = self._space[key]
        if not isinstance(each, Choices):
            return parameter
        return next(value for value in each.values if value_text(value) == parameter)


_RANDOM_TRIALS, _FEWEST_TO_PRUNE = 10, 4
"""Trials before the estimator has enough to go by, and runs that are over before one is given up."""


def trial_name(values: Values, number: int) -> str:
    """Return the name of a run of a search: its number, and its values with four digits.

    >>> trial_name({"train.learning_rate": 0.00012345678}, 3)
    '003,learning_rate=0.0001235'
    """
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
    return f"{number:03d},{run_name(rounded)}"
