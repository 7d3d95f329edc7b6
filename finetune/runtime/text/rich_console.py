"""Tables, colors and progress bars: the one module that creates rich consoles. Foreign text is shown as plain text."""

from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.segment import Segment
from rich.text import Text

from finetune.runtime.text.terminal import GuardedStream, escape_controls, guard_streams, printable


class SafeConsole(Console):
    """A console that makes escapes in texts visible; texts are never markup, links or emoji."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    @property
    def file(self) -> IO[str]:
        """Return the output stream, which removes secrets."""
        return styled_stream(cast(TextIO, super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return the text with visible escapes, also for cells of tables."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments, with visible escapes in their text."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(escape_controls(piece.text), piece.style)


class SafeProgress(Progress):
    """Progress bars; printed text scrolls above them with visible escapes."""

    def start(self) -> None:
        """Show the bars."""
        super().start()
        guard_streams()  # rich has replaced them by its own, which would pass on escapes


class SafeTextColumn(ProgressColumn):
    """A column of readable text next to a bar; `form` is filled in with the `task`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form

    def render(self, task: Task) -> Text:
        """Return the text."""
        return Text(printable(self._form.format(task=task)), no_wrap=True)


def styled_stream(stream: TextIO) -> IO[str]:
    """Return the stream for styled output, which keeps escapes but removes secrets."""
    inner = stream.stream if isinstance(stream, GuardedStream) else stream
    return cast(IO[str], GuardedStream(inner, keeps_escapes=True))
