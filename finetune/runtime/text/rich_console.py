"""Tables, colors and progress bars: the one place that creates rich consoles. Foreign text in them is plain text."""

from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.segment import Segment
from rich.text import Text

from finetune.runtime.text.terminal import GuardedStream, escape_controls, guard_streams, printable


class SafeConsole(Console):
    """A console that draws with escapes of its own and shows those of others; no text is markup, a link or an emoji."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    @property
    def file(self) -> IO[str]:
        """Return where it writes: what is written was made neutral, and loses its secrets there."""
        return styled_stream(cast(TextIO, super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return the text as it is drawn and measured, in a table's cell, too: readable."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of what is drawn, their text neutral."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(escape_controls(piece.text), piece.style)


class SafeProgress(Progress):
    """Progress bars above which whatever is printed scrolls, readable."""

    def start(self) -> None:
        """Show the bars."""
        super().start()
        guard_streams()  # rich has put itself in their place, and would obey escapes


class SafeTextColumn(ProgressColumn):
    """A column of readable text next to a bar; `form` is filled in with the `task`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form

    def render(self, task: Task) -> Text:
        """Return the text."""
        return Text(printable(self._form.format(task=task)), no_wrap=True)


def styled_stream(stream: TextIO) -> IO[str]:
    """Return the stream for what is drawn: it keeps escapes, and leaves secrets out."""
    inner = stream.stream if isinstance(stream, GuardedStream) else stream
    return cast(IO[str], GuardedStream(inner, keeps_escapes=True))
