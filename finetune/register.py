"""Interface for plugins: a decorator for each kind of thing that a job chooses by name, and the base of its options.

    from finetune import register

    @register.loss("focal", options=FocalOptions)
    def focal(log_probabilities, labels, batch, *, options): ...

docs/how-to/plugins.md says what each function is called with and what it returns.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from finetune.config.section import Section, key
from finetune.errors import RegistryError
from finetune.registry.formats import FORMATS, SOURCES, TEMPLATES, FormatEntry, SourceEntry, TemplateEntry
from finetune.registry.layouts import LAYOUTS, LayoutEntry, Reading
from finetune.registry.losses import (
    PREFERENCE_LOSSES,
    SESSION_LOSSES,
    TOKEN_LOSSES,
    PreferenceLossEntry,
    Score,
    TokenLossEntry,
    TokenScores,
)
from finetune.registry.observers import CALLBACKS, REPORTERS, CallbackEntry, ReporterEntry, Request
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES, OptimizerEntry, OptimizerState, ScheduleEntry
from finetune.registry.plugins import importing_module
from finetune.registry.table import Entry, Table
from finetune.registry.tasks import METRICS, TASKS, MetricEntry, TaskEntry

__all__ = [
    "OptimizerState",
    "Request",
    "Section",
    "callback",
    "format",
    "key",
    "layout",
    "loss",
    "metric",
    "optimizer",
    "reporter",
    "schedule",
    "source",
    "task",
    "template",
]

Implementation = TypeVar("Implementation", bound=Callable[..., Any])
Decorator = Callable[[Implementation], Implementation]
Options = type[Section] | None


def task(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a class or function from a `task.protocol.TaskContext` to a task; fields: fields of `TaskEntry`."""
    return _adding(TASKS, TaskEntry, name, options=options, **fields)


def optimizer(
    name: str,
    *,
    states: Iterable[OptimizerState],
    num_moments: int,
    options: Options = None,
    **fields: Any,
) -> Decorator[Any]:
    """Register a function from `train.optim.optimizers.OptimizerInputs` to an optimizer.

    `states` are the tensors that each class of optimizer keeps per parameter, which is what checkpoints hold.
    """
    return _adding(
        OPTIMIZERS, OptimizerEntry, name, options=options, states=tuple(states), num_moments=num_moments, **fields
    )


def schedule(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a function from a `train.plan.Schedule` and the steps done to a factor on the peak rate."""
    return _adding(SCHEDULES, ScheduleEntry, name, options=options, **fields)


def loss(
    name: str,
    *,
    scores: TokenScores = "log_probabilities",
    needs_reference: bool | None = None,
    score: Score | None = None,
    options: Options = None,
    **fields: Any,
) -> Decorator[Any]:
    """Register a loss: of tokens (`task.loss`), or of answers (`task.preference.loss`) with `needs_reference`.

    A loss of tokens is a function from the log-probabilities of the targets, [targets], or with `scores="logits"` their
    logits, [targets, vocabulary], the labels, [targets], and the batch to the loss of each target, [targets].
    A loss of answers is a function from the scores of the chosen and the rejected answers, [pairs], and the section
    `task.preference` to the loss of each pair, [pairs]; `score` says what it compares, by default log-probabilities, or
    with a reference model their ratios. A loss never takes a mean: that is taken once, over the step on all ranks.
    """
    if name in SESSION_LOSSES:  # a call of Session.forward_backward names either
        raise RegistryError(f"the loss `{name}` exists already. Choose another name.")
    if needs_reference is None and score is None:
        return _adding(TOKEN_LOSSES, TokenLossEntry, name, options=options, scores=scores, **fields)
    compared = score or ("ratio" if needs_reference else "log_probability")
    return _adding(PREFERENCE_LOSSES, PreferenceLossEntry, name, options=options, score=compared, **fields)


def metric(
    name: str, *, goal: Literal["minimize", "maximize"] = "maximize", options: Options = None, **fields: Any
) -> Decorator[Any]:
    """Register a function from the answers and the references, lists of texts, to a number."""
    return _adding(METRICS, MetricEntry, name, options=options, goal=goal, **fields)


def source(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a function that returns an iterable of rows, dictionaries of JSON values: the same ones each time."""
    return _adding(SOURCES, SourceEntry, name, options=options, **fields)


def format(name: str, *, required: Iterable[str], like: str, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a function from `data.formats.columns.Columns` to a row as the format `like` returns it.

    `required` are the columns that a row must have. A row of `messages` is `{"messages": [{"role": ..., ...}, ...]}`.
    """
    usual_task = FORMATS[like].usual_task
    entry = {"required": tuple(required), "like": like, "usual_task": usual_task, **fields}
    return _adding(FORMATS, FormatEntry, name, options=options, **entry)


def layout(
    name: str,
    *,
    description: str,
    roles: Mapping[str, str],
    readings: Iterable[Mapping[str, Any]] = (),
    remedy: str = "",
) -> None:
    """Register a layout of rows that `finetune preview` and `finetune init` recognize, before our own.

    `roles` and `remedy` are as in `registry.layouts.LayoutEntry`; each reading has the keys of
    `registry.layouts.Reading`.
    """
    LAYOUTS.register(
        LayoutEntry(
            name=name,
            description=description,
            roles=roles,
            readings=tuple(Reading(**reading) for reading in readings),
            remedy=remedy,
            plugin=importing_module(__name__),
        )
    )


def template(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a function that returns a chat template as Jinja text."""
    return _adding(TEMPLATES, TemplateEntry, name, options=options, **fields)


def reporter(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a class that is made with the run folder, a path, on rank 0; it is called with every event, and closed.

    A reporter that fails is disabled with a warning.
    """
    return _adding(REPORTERS, ReporterEntry, name, options=options, **fields)


def callback(name: str, *, options: Options = None, **fields: Any) -> Decorator[Any]:
    """Register a class that is made without arguments on every rank; it is called with every event.

    It returns a Request, or None. What one rank requests, all ranks do before the next step.
    """
    return _adding(CALLBACKS, CallbackEntry, name, options=options, **fields)


def _adding(
    table: Table[Any], entry_type: type[Entry], name: str, *, options: Options, **fields: Any
) -> Decorator[Any]:
    """Return the decorator that registers what it decorates under the name, and returns it unchanged."""
    if options is not None and not (isinstance(options, type) and issubclass(options, Section)):
        raise RegistryError(f"{table.title} `{name}`: options are a class that derives from register.Section.")

    def add(implementation: Implementation) -> Implementation:
        path = f"{implementation.__module__}:{implementation.__qualname__}"
        if not path.rpartition(":")[2].isidentifier():
            raise RegistryError(f"{table.title} `{name}`: define {path} at the top level of its module.")
        try:
            entry = entry_type(
                name=name,
                implementation=path,
                plugin=importing_module(implementation.__module__),
                options=options,
                **fields,
            )
        except TypeError as error:  # a fact that the entry does not have
            raise RegistryError(f"{table.title} `{name}`: {str(error).partition('() ')[2] or error}.") from error
        table.register(entry)
        return implementation

    return add
