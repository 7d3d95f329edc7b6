"""`finetune sweep --search N`: the runs of a search, those of an interrupted one included."""

from dataclasses import dataclass, field

from finetune.commands.sweep.plan.grid import SweepRun, Values, make_run
from finetune.commands.sweep.results.ranking import read_result
from finetune.commands.sweep.running.history import RunHistory
from finetune.commands.sweep.session import SweepSession
from finetune.commands.sweep.state.outcome import Outcome
from finetune.commands.sweep.study.space import Space
from finetune.commands.sweep.study.study import SearchStudy


@dataclass
class SearchSource:
    """Gives the runs of a search: first those that were interrupted, then new ones, up to the number asked for."""

    session: SweepSession
    study: SearchStudy
    waiting: list[SweepRun] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Return how many runs are to be started, those that continue included."""
        return len(self.waiting) + max(0, (self.session.request.search or 0) - self.study.num_trials)

    def next_run(self) -> SweepRun | None:
        """Return the next run."""
        if self.waiting:
            return self.waiting.pop(0)
        if self.num_left == 0:
            return None
        name, values = self.study.next_trial()
        return self._run(name, values)

    def is_hopeless(self, run: SweepRun, history: RunHistory) -> bool:
        """Tell whether the run is to be pruned."""
        return self.study.is_hopeless(run.name, history)

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Tell the study what the run has reached."""
        self.study.end(read_result(run, outcome, self.session.objective, history=history), history)

    def _run(self, name: str, values: Values) -> SweepRun:
        return make_run(values, self.session.axes, name=name, folder=self.session.folder)


def open_search(session: SweepSession, space: Space) -> SearchSource:
    """Return the search with everything that its earlier calls have tried."""
    study = SearchStudy(space, session.objective, seed=session.request.seed, folder=session.folder)
    source = SearchSource(session, study)
    for record in list(session.book.state.runs.values()):
        run = session.recorded_run(record)
        history = RunHistory(run.folder / "events.jsonl")
        result = read_result(run, session.book.outcome(run), session.objective, history=history)
        study.restore(result, history, is_due=session.is_due(run))
        if study.is_open(run.name):
            source.waiting.append(run)
    return source
