"""Draws the calls of a start: the files that a reader enters from the command line to the first step, and the returns.

    python benchmarks/call_drawing.py                    # a quickstart of one process, in this checkout
    python benchmarks/call_drawing.py --tree ../before   # of another one beside it
    python benchmarks/call_drawing.py --outline          # also the files in the order in which they are entered

The run is the product's: `finetune train` on the quickstart's job, whose first step ends the drawing. A reader follows
every call of the main thread into the functions of this package, each of them once, in the order in which they are
first called: a function that was read is known. A return is a call from another file into one that was entered before.
Where a function calls several others of one file, as a table of checks does, a reader turns to that file once: that
figure is given, too. What runs while a module is imported, in a worker or in another thread is not drawn. Of `cli` and
`run`, where a start is put together, the figures are also given alone: with what they call, and without what that calls
in turn.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_STEP = "finetune/train/step.py:take_step"
_ASSEMBLY = ("finetune/cli/", "finetune/run/")
_UNNAMED = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclass(frozen=True)
class Call:
    """The first call of a function: its file and name, the caller's, and the depth of calls within the package."""

    file: str
    name: str
    caller: str
    caller_name: str
    depth: int


@dataclass(frozen=True)
class Drawing:
    """The calls of a start in the order in which they were made."""

    calls: Sequence[Call]

    @property
    def files(self) -> Sequence[str]:
        """Return the files in the order in which they are entered."""
        return list(dict.fromkeys(call.file for call in self.calls))

    @property
    def returns(self) -> Sequence[Call]:
        """Return the calls from another file that go to one that was entered before."""
        entered, returns = set[str](), list[Call]()
        for call in self.calls:
            if call.file != call.caller and call.file in entered:
                returns.append(call)
            entered.add(call.file)
        return returns

    @property
    def assembly(self) -> "Drawing":
        """Return the calls that `cli` and `run` make."""
        return Drawing([call for call in self.calls if call.caller.startswith(_ASSEMBLY)])

    def figures(self) -> str:
        """Return the number of functions, files and returns, and of the turns of a page that the returns are."""
        returns, num_calls = self.returns, len(self.calls)
        turns = {(call.caller, call.caller_name, call.file) for call in returns}
        per_500 = [500 * len(counted) / num_calls for counted in (returns, turns)]
        return (
            f"{num_calls} functions, {len(self.files)} files, {len(returns)} returns ({per_500[0]:.0f} per 500), "
            f"{len(turns)} where a function's calls into a file count once ({per_500[1]:.0f})"
        )

    def lines(self, *, has_outline: bool) -> Iterator[str]:
        """Yield the figures, and the outline: for each file the number of functions that are read in it."""
        yield f"the whole start: {self.figures()}"
        yield f"what cli and run call: {self.assembly.figures()}"
        if has_outline:
            counts = Counter(call.file for call in self.calls)
            yield from (f"{counts[file]:4d}  {file}" for file in self.files)


def draw(root: Path, arguments: Sequence[str]) -> Drawing:
    """Return the calls of `finetune train` with these arguments until its first step begins, in this process."""
    package, calls, known = f"{root}/", list[Call](), set[Any]()
    callers, num_imports = [("finetune/cli/", "")], 0  # the calls under way: file and name

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_imports
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{package}finetune/"):
            return
        num_imports += (1 if event == "call" else -1) if code.co_name == "<module>" else 0
        if event == "return":
            callers.pop()
            return
        file = code.co_filename.removeprefix(package)
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in _UNNAMED
        if is_function and not num_imports and code not in known:
            known.add(code)
            calls.append(Call(file, code.co_qualname, *callers[-1], len(callers)))
            if f"{file}:{code.co_qualname}" == _STEP:
                sys.setprofile(None)
        callers.append((file, code.co_qualname))

    from finetune.cli.program import main  # of the tree that is drawn

    sys.argv = ["finetune", "train", *arguments]
    sys.setprofile(follow)
    try:
        main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    assert calls and f"{calls[-1].file}:{calls[-1].name}" == _STEP, "the run did not come to its first step"
    return Drawing(calls)


def _of_quickstart(root: Path, output: Path) -> None:
    """Draw the quickstart of one process into a file; this process is a fresh one."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "quickstart"
        subprocess.run(
            [sys.executable, "-m", "finetune", "init", "quickstart", "--into", str(into)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        settings = ("train.steps=1", "train.schedule.warmup_steps=0", "export.verify=false")
        words = [word for setting in settings for word in ("--set", setting)]
        drawing = draw(root, ["--config", str(into / "job.yaml"), *words])
    output.write_text(json.dumps([astuple(call) for call in drawing.calls]), encoding="utf-8")


def main() -> None:
    """Draw the start in a process of its own and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="Checkout to draw.")
    parser.add_argument("--outline", action="store_true", help="Also print the files in the order of a reader.")
    parser.add_argument("--calls", type=Path, help="Also write every call, indented by its depth, to this file.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.tree.resolve()
    if options.worker is not None:
        _of_quickstart(root, options.worker)
        return
    environment = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--tree", str(root), "--worker", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**environment, "HOME": folder}, cwd=folder)
        drawing = Drawing([Call(*values) for values in json.loads(path.read_text(encoding="utf-8"))])
    for line in drawing.lines(has_outline=options.outline):
        print(line)
    if options.calls is not None:
        lines = (f"{'  ' * call.depth}{call.file}:{call.name}" for call in drawing.calls)
        options.calls.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
