"""The row formats that `format` of a source accepts; and sources and chat templates, which only plugins add."""

from dataclasses import dataclass

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class FormatEntry(Entry):
    """A format. Its implementation is a function from `data.formats.columns.Columns` to the content of the row."""

    required: tuple[str, ...]  # columns that a row must have
    optional: tuple[str, ...] = ()
    joined: str | None = None  # the column that may be made of several columns of the row
    classes: str | None = None  # the column that has classes, whose numbers a dataset may name
    usual_task: str  # the task that is most often trained on such rows
    like: str = ""  # a built-in format whose rows it returns: tasks that read that format read this one, too

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.required or not self.implementation:
            raise RegistryError(f"format `{self.name}`: it needs a required column and an implementation.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns that a row may have."""
        return self.required + self.optional


_OF_TURNS = ("system", "tools", "functions", "images", "chat_template_kwargs")
_NEGATIVES = ("negative", "negatives")

FORMATS = Table(
    "format",
    FormatEntry,
    (
        FormatEntry(
            name="messages",
            description="role/content turns, `system`, `tools`, `images`",
            implementation="finetune.data.formats.row_format:read_conversation",
            required=("messages",),
            optional=_OF_TURNS,
            usual_task="sft",
        ),
        FormatEntry(
            name="conversations",
            description="from/value turns, `tools`, `images`, `system`",
            implementation="finetune.data.formats.row_format:read_conversation",
            required=("conversations",),
            optional=_OF_TURNS,
            usual_task="sft",
        ),
        FormatEntry(
            name="preference",
            description="prompt/chosen/rejected",
            implementation="finetune.data.formats.row_format:read_preference",
            required=("chosen", "rejected"),
            optional=("prompt", "system", "tools", "functions", "margin", "chat_template_kwargs"),
            usual_task="preference",
        ),
        FormatEntry(
            name="prompt_completion",
            description="texts or turns",
            implementation="finetune.data.formats.row_format:read_prompt_completion",
            required=("prompt", "completion"),
            optional=_OF_TURNS,
            usual_task="sft",
        ),
        FormatEntry(
            name="instruction",
            description="instruction/input/output, `system`",
            implementation="finetune.data.formats.row_format:read_instruction",
            required=("instruction", "output"),
            optional=("input", "system", "images", "chat_template_kwargs"),
            usual_task="sft",
        ),
        FormatEntry(
            name="judged",
            description="prompt/completion and whether it is good",
            implementation="finetune.data.formats.row_format:read_judged",
            required=("prompt", "completion", "label"),
            optional=("system", "tools", "functions", "chat_template_kwargs"),
            usual_task="preference",
        ),
        FormatEntry(
            name="image_label",
            description="image/label",
            implementation="finetune.data.formats.row_format:read_image_label",
            required=("image", "label"),
            classes="label",
            usual_task="image_classification",
        ),
        FormatEntry(
            name="labelled",
            description="text/label",
            implementation="finetune.data.formats.row_format:read_labelled",
            required=("text", "label"),
            optional=("text_pair",),
            joined="label",
            classes="label",
            usual_task="text_classification",
        ),
        FormatEntry(
            name="tagged",
            description="words and tags",
            implementation="finetune.data.formats.row_format:read_tagged",
            required=("tokens", "tags"),
            classes="tags",
            usual_task="token_classification",
        ),
        FormatEntry(
            name="spans",
            description="text and [start, end, label] spans, which become words and IOB2 tags",
            implementation="finetune.data.formats.spans:read_spans",
            required=("text", "spans"),
            usual_task="token_classification",
        ),
        FormatEntry(
            name="text",
            description="`text` alone",
            implementation="finetune.data.formats.row_format:read_text_row",
            required=("text",),
            usual_task="pretrain",
        ),
        FormatEntry(
            name="pairs",
            description="anchor/positive, `negative` or a list of `negatives`",
            implementation="finetune.data.formats.row_format:read_group",
            required=("anchor", "positive"),
            optional=_NEGATIVES,
            joined="negatives",
            usual_task="embedding",
        ),
        FormatEntry(
            name="retrieval",
            description="query/positive, `negative` or a list of `negatives`",
            implementation="finetune.data.formats.row_format:read_group",
            required=("query", "positive"),
            optional=_NEGATIVES,
            joined="negatives",
            usual_task="embedding",
        ),
        FormatEntry(
            name="scored_pairs",
            description="sentence1/sentence2/score",
            implementation="finetune.data.formats.row_format:read_scored_pairs",
            required=("sentence1", "sentence2", "score"),
            usual_task="embedding",
        ),
    ),
)
"""In the order in which they are tried on a row whose format is unset."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Entry):
    """A source of rows that `source` names. Its implementation is a function that returns an iterable of rows.

    It is called again for every pass over the rows, on every rank, and must return the same rows each time.
    """


SOURCES: Table[SourceEntry] = Table("source", SourceEntry)


@dataclass(frozen=True, kw_only=True)
class TemplateEntry(Entry):
    """A chat template that `data.chat_template` names. Its implementation is a function that returns the Jinja text."""


TEMPLATES: Table[TemplateEntry] = Table("chat template", TemplateEntry)
