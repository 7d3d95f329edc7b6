"""`Session`: a job taken step by step in the caller's own loop, on the engine and under the strategies of a run."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from finetune.api.job import JobLike, Overrides, as_job
from finetune.errors import UserError
from finetune.run.session.results import (
    ForwardBackward,
    JobBatch,
    LossFunction,
    OptimStep,
    Prompt,
    Rows,
    Sample,
    Scores,
)
from finetune.runtime.optional import lazily

with lazily():  # torch
    from finetune.run import in_process, supervision
    from finetune.run.session import engine, open, sampling

__all__ = ["ForwardBackward", "JobBatch", "OptimStep", "Sample", "Session"]

_CLOSE, _FOLLOW = "close", "follow"


class Session:
    """A run whose steps the caller takes; a context manager that builds the run and closes it.

    Every rank makes the same calls with the same arguments, the rows of the whole step; or rank 0 makes them, and the
    others call `follow`. All errors come from `finetune.errors`.
    """

    def __init__(self, job: JobLike, *, overrides: Overrides | None = None) -> None:
        """`job` is a Job, its file or its sections; `overrides` are keys in place of its own: `{"train.steps": 4}`."""
        self._job = as_job(job)
        self._overrides = overrides
        self._stack = ExitStack()
        self._engine: Any = None  # a StepEngine
        self._methods: dict[str, Callable[..., Any]] = {}
        self._thread = 0
        self._failure: BaseException | None = None
        self._state = "is not open. Use it as a context manager: `with Session(job) as session:`"

    def __enter__(self) -> Self:
        if self._engine is not None or self._thread:
            raise UserError("the session was opened before. Make another one.")
        self._thread = threading.get_ident()
        loaded = self._job.load(self._overrides)
        with ExitStack() as stack:
            stack.enter_context(in_process.isolated_run())
            stack.callback(self._forget)  # so that the model is gone before the process groups are
            self._engine = engine.StepEngine(stack.enter_context(open.open_run(loaded)))
            self._stack = stack.pop_all()
        names = ("next_batch", "forward_backward", "optim_step", "log_probabilities")
        self._methods = {name: getattr(self._engine, name) for name in (*names, "evaluate", "save", "load", "export")}
        self._methods["sample"] = partial(sampling.sample, self._engine)
        self._state = ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state, self._state = self._state, self._state or "is closed. Make another one"
        if error is None and not state:
            try:
                engine.agree(_CLOSE, {})
            except BaseException as failure:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
                raise
        reason = error or self._failure  # after an error no rank waits for another
        self._stack.__exit__(type(reason) if reason else None, reason, reason.__traceback__ if reason else None)

    @property
    def step(self) -> int:
        """Return the number of steps that were taken, over all starts of the run."""
        return int(self._opened("step").progress.step)

    @property
    def tokenizer(self) -> Any:
        """Return the job's tokenizer."""
        return self._opened("tokenizer").tokenizer

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return int(self._opened("rank").rank)

    def batches(self) -> Iterator[JobBatch]:
        """Yield the job's own rows of each step, from the next one to the last, in the job's order. Collective."""
        last = 0
        while (batch := self._call("next_batch")) is not None:
            if batch.step == last:
                raise UserError(f"batches: no step was taken with the rows of step {last}. Call `optim_step` first.")
            last = batch.step
            yield batch

    def forward_backward(
        self, rows: JobBatch | Rows, *, loss: str | LossFunction | None = None, scores: Scores = "log_probabilities"
    ) -> ForwardBackward:
        """Accumulate the gradient of the loss of the rows of all ranks. Collective.

        A row has the columns of the job's rows, or `input_ids` and, per token, `weights`, which multiply the losses.
        `loss` is by default the job's own; it may be a name (`cross_entropy`, `policy_gradient`, `importance_sampling`,
        `clipped_importance_sampling`) or a function from the `scores` of the targets, their labels and the batch to the
        loss of each target. Losses are summed over the calls of a step and divided by the
        number of its targets, on all ranks, in `optim_step`.
        """
        return self._call("forward_backward", rows=rows, loss=loss, scores=scores)  # type: ignore[no-any-return]

    def optim_step(self, *, learning_rate: float | None = None) -> OptimStep:
        """Clip the gradient, update the weights and drop the gradient. Collective.

        The learning rate is that of the job's schedule unless it is given.
        """
        return self._call("optim_step", learning_rate=learning_rate)  # type: ignore[no-any-return]

    def log_probabilities(self, rows: Rows) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of each target of every row, without dropout. Collective."""
        return self._call("log_probabilities", rows=rows)  # type: ignore[no-any-return]

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        batch_size: int = 32,
    ) -> list[list[Sample]]:
        """Return `num_samples` answers of the present model to each prompt: a text, turns, or tokens. Collective.

        The samples depend on neither ranks nor batches. Without a seed, it is derived from the job's and the step.
        """
        return self._call(  # type: ignore[no-any-return]
            "sample",
            prompts=prompts,
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
        )

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the present model on the validation rows. Collective."""
        return self._call("evaluate")  # type: ignore[no-any-return]

    def save(self) -> Path:
        """Save a checkpoint, which every strategy and `finetune` itself can load, and return its folder. Collective."""
        return self._call("save")  # type: ignore[no-any-return]

    def load(self, checkpoint: str | Path | None = None) -> int:
        """Load the run's newest checkpoint, or the one in this folder, and return its step. Collective.

        Opening a session does so, too, as `checkpoint.resume` says.
        """
        return self._call("load", checkpoint=checkpoint)  # type: ignore[no-any-return]

    def export(self) -> Path:
        """Write the model to `final/` of the run folder, and return that folder. Collective."""
        return self._call("export")  # type: ignore[no-any-return]

    def follow(self) -> None:
        """Take part in the calls of rank 0, which alone runs the caller's loop, until it leaves the context."""
        while True:
            opened = self._opened(_FOLLOW)
            agreed, has_leader = engine.agree(_FOLLOW, {})
            if not has_leader:
                raise UserError("follow: rank 0 must lead. Call `follow` on the other ranks only.")
            if agreed == _CLOSE:
                self._state = "is closed by rank 0. Make another one"
                return
            try:
                method, arguments = engine.receive_call()
                self._run(method, arguments)
            except UserError:
                if opened.is_changing:
                    raise  # else rank 0 may handle it and go on

    def _call(self, method: str, **arguments: Any) -> Any:
        self._opened(method)
        _, has_followers = engine.agree(method, arguments)
        if has_followers:
            engine.send_call(method, arguments)
        return self._run(method, arguments)

    def _run(self, method: str, arguments: Mapping[str, Any]) -> Any:
        opened = self._opened(method)
        try:
            with supervision.model_code_errors():
                return self._methods[method](**arguments)
        except BaseException as error:
            if opened.is_changing or not isinstance(error, UserError):
                text = str(error).splitlines() or [type(error).__name__]
                self._failure = error
                self._state = f"had an error at step {opened.progress.step + 1}: {text[0]} Open it again: it resumes"
            raise

    def _forget(self) -> None:
        self._engine, self._methods = None, {}

    def _opened(self, method: str) -> Any:
        """Return the engine; raises UserError where the session cannot be used."""
        if self._engine is None or self._state:
            raise UserError(f"{method}: the session {self._state}.")
        if threading.get_ident() != self._thread:
            raise UserError(f"{method}: the session was opened in another thread. Use it in that one only.")
        return self._engine
