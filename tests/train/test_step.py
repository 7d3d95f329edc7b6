"""One step: its result does not depend on the split of the batch, and a NaN changes no weight."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.config.sections.train import NonFiniteSection, OptimizerSection, ScheduleSection, TrainSection
from finetune.data.batch import Batch
from finetune.data.token_cache.integrity import Delivery, samples_checksum
from finetune.errors import NonFiniteError, TrainingError
from finetune.report.events import StepSkipped, StepTaken
from finetune.report.profile import Profile
from finetune.runtime.progress import Cadence, NeverDue, Progress
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.task.protocol import BaseTask
from finetune.train import step as steps
from finetune.train.loop import run_training_loop
from finetune.train.meters import Meters
from finetune.train.optim.optimizers import build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.plan import make_step_plan
from finetune.train.step import PrefetchedSteps, StepCounts, TrainingComponents
from finetune.train.stopping import EarlyStopping, StopRequest, StopSources
from finetune.train.update import Update
from tests.refusals import refused
from tests.train.deferred_checks import defer_finite_checks

NUM_SAMPLES, LENGTH = 8, 6


class Kept:
    """Records the steps of the requested checkpoints."""

    has_failed = False

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.has_waited = False

    def __call__(self, progress: Progress) -> None:
        self.steps.append(progress.step)

    def report_written(self) -> None:
        pass

    def wait_for_writes(self) -> None:
        self.has_waited = True


class RegressionTask(BaseTask):
    """The squared error at each target; sample 5 can be made to give NaN."""

    def __init__(self, poisoned: int | None = None) -> None:
        self.poisoned = poisoned

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"loss_sum": self.loss_sum(model, batch)}

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        errors = (model(batch.inputs["x"]).squeeze(-1) - batch.inputs["y"]) ** 2  # [batch, length]
        loss = (errors * (batch.labels >= 0)).sum()
        return loss * float("nan") if self.poisoned in batch.sample_ids else loss


def batch_of(samples: range) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, LENGTH, 4, generator=generator)
    y = torch.randn(NUM_SAMPLES, LENGTH, generator=generator)
    labels = torch.where(torch.rand(NUM_SAMPLES, LENGTH, generator=generator) < 0.5, 1, -100)
    labels[0] = -100  # a sample without a single target
    chosen = list(samples)
    own = labels[chosen]
    return Batch({"x": x[chosen], "y": y[chosen]}, own, int((own >= 0).sum()), own.numel(), tuple(chosen))


class Handed:
    """Expects all samples in every step, and reports the given samples as damaged."""

    def __init__(self, *, damaged=()):
        self.damaged, self.explained = damaged, []

    def expected(self, step):
        return samples_checksum(range(NUM_SAMPLES), range(NUM_SAMPLES))

    def received(self, group):
        ids = [sample_id for batch in group for sample_id in batch.sample_ids]
        return Delivery(samples_checksum(ids, ids), self.damaged)

    def explain(self, damaged):
        self.explained.append(damaged)
        return (f"rows {damaged} are not what was prepared",)


def parts_of(
    microbatch: int, *, task=None, nonfinite=None, num_steps=3, events=None, sample_verifier=None
) -> TrainingComponents:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = build_optimizer(list_parameters(model), OptimizerSection(), learning_rate=0.1)
    section = TrainSection(
        global_batch_size=NUM_SAMPLES,
        microbatch_size=microbatch,
        steps=num_steps,
        learning_rate=0.1,
        schedule=ScheduleSection(name="constant"),
    )
    starts = range(0, NUM_SAMPLES, microbatch)
    group = tuple(batch_of(range(start, min(start + microbatch, NUM_SAMPLES))) for start in starts)
    model, optimizer = accelerator.prepare(model, optimizer)
    events = [] if events is None else events
    return TrainingComponents(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        task=task or RegressionTask(),
        groups=lambda first_step: iter([group] * (num_steps - first_step)),
        plan=make_step_plan(section, num_positions=NUM_SAMPLES, world=1, steps_for_tokens=lambda tokens: 0),
        sample_verifier=sample_verifier or Handed(),
        row_location=lambda sample_id: f"rows.jsonl, row {sample_id + 1}",
        seed=1,
        update=Update(accelerator, model, optimizer, max_gradient_norm=1.0),
        nonfinite=nonfinite or NonFiniteSection(),
        scales_loss=False,
        meters=Meters(),
        reporter=events.append,
        evaluate=lambda step: {},
        save=Kept(),
        log_due=Cadence(1, num_steps),
        evaluate_due=NeverDue(),
        save_due=Cadence(None, num_steps),
        stop_sources=StopSources(ReceivedSignals()),
        stop_after_steps=None,
        early_stopping=EarlyStopping(None),
    )


def trained(microbatch: int) -> tuple[list[float], list[float], torch.Tensor]:
    events: list = []
    components = parts_of(microbatch, events=events)
    assert run_training_loop(components, Progress()) == "finished"
    taken = [event for event in events if isinstance(event, StepTaken)]
    return [each.loss for each in taken], [each.gradient_norm for each in taken], components.model.weight.detach()


@pytest.mark.parametrize("microbatch", [1, 2, 3, 4, 5, 7])
def test_seven_ways_to_cut_a_batch_give_the_same_steps(microbatch):
    losses, norms, weight = trained(microbatch)
    whole_losses, whole_norms, whole_weight = trained(NUM_SAMPLES)
    assert losses == pytest.approx(whole_losses, rel=1e-6)
    assert norms == pytest.approx(whole_norms, rel=1e-6)
    torch.testing.assert_close(weight, whole_weight, rtol=1e-6, atol=1e-7)


def test_the_loss_is_the_mean_over_all_targets_of_the_step():
    batch = batch_of(range(NUM_SAMPLES))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    errors = (model(batch.inputs["x"]).squeeze(-1) - batch.inputs["y"]) ** 2
    assert trained(2)[0][0] == pytest.approx(errors[batch.labels >= 0].mean().item(), rel=1e-6)


def test_a_nan_stops_the_run_names_its_samples_and_changes_no_weight():
    components = parts_of(2, task=RegressionTask(poisoned=5))
    before = components.model.weight.detach().clone()
    with refused(NonFiniteError, "step 1 ", "rows.jsonl, row 5", "6."):
        run_training_loop(components, Progress())
    assert torch.equal(components.model.weight.detach(), before)


def test_a_skipped_step_changes_nothing_and_is_counted():
    events: list = []
    components = parts_of(
        2, task=RegressionTask(poisoned=5), nonfinite=NonFiniteSection(action="skip", max_skips=2), events=events
    )
    progress = Progress()
    with refused(NonFiniteError, "2 steps"):
        run_training_loop(components, progress)
    assert progress.num_nonfinite_skips == 2
    assert [(event.step, event.sample_ids) for event in events if isinstance(event, StepSkipped)] == [
        (1, (4, 5)),
        (2, (4, 5)),
    ]


def test_progress_counts_tokens_and_resumes_at_its_step():
    progress = Progress(step=2)
    run_training_loop(parts_of(4), progress)
    assert progress.step == 3
    assert progress.num_tokens == NUM_SAMPLES * LENGTH


class OverflowingTask(RegressionTask):
    """A finite loss with an infinite gradient, as with a loss scale that is too high."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss_sum(model, batch) + (model.weight * 0.0).sum().sqrt()


def test_a_loss_scale_overflow_is_counted_separately_and_does_not_stop_the_run():
    events: list = []
    components = replace(parts_of(4, task=OverflowingTask(), events=events), scales_loss=True)
    before, progress = components.model.weight.detach().clone(), Progress()
    assert run_training_loop(components, progress) == "finished"
    assert (progress.num_scale_skips, progress.num_nonfinite_skips) == (3, 0)
    assert {event.reason for event in events if isinstance(event, StepSkipped)} == {"loss scale"}
    assert torch.equal(components.model.weight.detach(), before)


def test_a_stop_requested_before_the_first_step_takes_no_step_and_saves_nothing():
    components = parts_of(4)
    components.stop_sources.note.note(signal.SIGTERM, None)
    progress = Progress()
    assert run_training_loop(components, progress) == "signal SIGTERM"
    assert (progress.step, components.save.steps, components.save.has_waited) == (0, [], True)


class SignallingTask(RegressionTask):
    """Sends a signal in the middle of the second step."""

    def __init__(self, note: ReceivedSignals, number: signal.Signals) -> None:
        super().__init__()
        self.note, self.number, self.num_calls = note, number, 0

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self.note.note(self.number, None)
        return super().loss_sum(model, batch)


@pytest.mark.parametrize(
    ("number", "reason", "saved"), [(signal.SIGTERM, "signal SIGTERM", [2]), (signal.SIGUSR1, "finished", [2, 3])]
)
def test_a_signal_lets_its_step_finish_and_then_saves(number, reason, saved):
    note, events = ReceivedSignals(), []
    task = SignallingTask(note, number)
    components = replace(
        parts_of(NUM_SAMPLES, task=task, events=events), stop_sources=StopSources(note), log_due=Cadence(50, 3)
    )
    progress = Progress()
    assert run_training_loop(components, progress) == reason
    assert components.save.steps == saved
    assert len([event for event in events if isinstance(event, StepTaken)]) == progress.step == saved[-1]


class Diverging(RegressionTask):
    """The loss is NaN in the given steps, counted from 1."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps, self.num_calls = steps, 0

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.num_calls += 1
        return super().loss_sum(model, batch) * (float("nan") if self.num_calls in self.steps else 1.0)


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def reads_later(request, monkeypatch) -> bool:
    """Parametrize whether the host reads at once or at a log point whether a gradient is finite."""
    if request.param:
        defer_finite_checks(monkeypatch)
    return request.param


def run_of(*bad_steps: int, action="skip", max_skips=5, num_steps=8, log_every=4):
    events: list = []
    section = NonFiniteSection(action=action, **({"max_skips": max_skips} if action == "skip" else {}))
    components = parts_of(
        NUM_SAMPLES, task=Diverging(*bad_steps), nonfinite=section, num_steps=num_steps, events=events
    )
    return replace(components, log_due=Cadence(log_every, num_steps)), events


def test_a_skipped_step_changes_neither_weights_nor_moments_whenever_it_is_detected(reads_later):
    components, events = run_of(2, 6)
    progress = Progress()
    run_training_loop(components, progress)
    assert (components.update.finite_check is not None) == reads_later
    assert (progress.step, progress.num_nonfinite_skips) == (8, 2)
    assert [event.step for event in events if isinstance(event, StepSkipped)] == [2, 6]
    assert [event.step for event in events if isinstance(event, StepTaken)] == list(range(1, 9))
    others, _ = run_of(num_steps=6)
    run_training_loop(others, Progress())  # the same six updates; their rate is constant
    assert torch.equal(components.model.weight, others.model.weight)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(moment(components, name), moment(others, name))


def test_a_run_that_stops_has_the_weights_from_before_the_step(reads_later):
    components, events = run_of(3, action="stop")
    with refused(NonFiniteError, "step 3"):
        run_training_loop(components, Progress())
    others, _ = run_of(num_steps=2)
    run_training_loop(others, Progress())
    assert torch.equal(components.model.weight, others.model.weight)
    assert all(event.step < 3 for event in events if isinstance(event, StepTaken))


def test_exceeding_the_skip_limit_stops_the_run_without_changing_weights(reads_later):
    components, _ = run_of(1, 2, 3, max_skips=2)
    progress = Progress()
    with refused(NonFiniteError, "step 3", "2 steps"):
        run_training_loop(components, progress)
    assert progress.num_nonfinite_skips == 2
    assert torch.equal(components.model.weight, parts_of(NUM_SAMPLES).model.weight)


def test_a_checkpoint_counts_all_skipped_steps_before_it(reads_later):
    components, _ = run_of(1, 2, log_every=8)
    saved = []
    components = replace(components, save_due=Cadence(2, 8), save=Noting(lambda progress: saved.append(progress)))
    run_training_loop(components, Progress())
    assert saved == [(2, 2), (4, 2), (6, 2), (8, 2)]


def test_a_nonfinite_step_ends_the_run_before_the_next_log_point(monkeypatch):
    defer_finite_checks(monkeypatch)
    components, _ = run_of(1, action="stop", log_every=8)
    with refused(NonFiniteError, "step 1"):
        run_training_loop(components, Progress())
    assert components.task.num_calls == 1  # the second step's count has brought the news


class Noting(Kept):
    """Records step and skips of each progress that is saved."""

    def __init__(self, note) -> None:
        super().__init__()
        self.note = note

    def __call__(self, progress: Progress) -> None:
        self.note((progress.step, progress.num_nonfinite_skips))


def moment(components: TrainingComponents, name: str) -> torch.Tensor:
    (state,) = [each for key, each in components.optimizer.state.items() if key.shape == components.model.weight.shape]
    return state[name]


def test_damaged_samples_stop_the_run_before_its_weights_change():
    handed = Handed(damaged=(3, 5))
    components = parts_of(2, sample_verifier=handed)
    before = components.model.weight.detach().clone()
    with refused(TrainingError, "step 1", "rows (3, 5)"):
        run_training_loop(components, Progress())
    assert handed.explained == [(3, 5)]
    assert torch.equal(components.model.weight, before)


def test_samples_of_another_step_stop_the_run():
    handed = Handed()
    handed.expected = lambda step: samples_checksum([0], [0])
    with refused(TrainingError):
        run_training_loop(parts_of(2, sample_verifier=handed), Progress())


COUNTS = StepCounts(1, 1, 0, StopRequest(None, saves=False), has_news=False)
SLOW = StepCounts(1, 1, 0, StopRequest(None, saves=False), has_news=False, is_slow=True)


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What was fetched, counted and waited for, in order."""
    found: list[str] = []

    def start(components, batches, *, step, is_slow):
        found.append(f"count {step}{' slow' if is_slow else ''}")
        return lambda: found.append(f"wait {step}") or COUNTS

    monkeypatch.setattr(steps, "start_step_counts", start)
    return found


def components(log, *, num_steps=8, evaluate_due=None, stop_after_steps=None, counts_ahead=True) -> SimpleNamespace:
    def groups(first_step):
        for step in range(first_step, num_steps):
            log.append(f"fetch {step}")
            yield (f"batch of {step}",)

    return SimpleNamespace(
        groups=groups,
        plan=SimpleNamespace(num_steps=num_steps),
        evaluate_due=evaluate_due or NeverDue(),
        stop_after_steps=stop_after_steps,
        counts_ahead=counts_ahead,
        profile=Profile(),
    )


def run(log, *, first_step=0, last=4, counts=COUNTS, **settings) -> list[str]:
    groups = PrefetchedSteps(components(log, **settings), first_step=first_step)
    for step in range(first_step, last):
        batches, _, _ = groups.take(step)
        assert batches == (f"batch of {step}",)
        log.append(f"forward {step}")
        groups.start_next_count(step + 1, counts=counts)
        log.append(f"backward {step}")
    return log


def test_the_next_step_is_counted_before_the_backward_pass_and_awaited_after_it(log):
    run(log)
    assert log[:7] == ["fetch 0", "count 0", "wait 0", "forward 0", "backward 0", "fetch 1", "count 1"]
    assert log[8:15] == ["forward 1", "fetch 2", "count 2", "backward 1", "wait 2", "forward 2", "fetch 3"]


def test_no_count_is_started_that_may_never_be_awaited(log):
    run(log, last=8)
    assert log[-2:] == ["forward 7", "backward 7"]
    assert log.count("wait 7") == 1
    assert "count 8" not in log


def test_slow_steps_are_counted_at_their_start_so_that_a_stop_takes_effect_immediately(log, monkeypatch):
    monkeypatch.setattr(steps, "SLOW_SECONDS", -1.0)
    run(log, counts=SLOW)
    assert log[:10] == [
        *("fetch 0", "count 0 slow", "wait 0", "forward 0", "backward 0"),
        *("fetch 1", "count 1 slow", "wait 1", "forward 1", "backward 1"),
    ]
