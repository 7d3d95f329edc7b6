"""A reporter and a callback."""

from pathlib import Path

from finetune import register


@register.reporter("line_file")
class LineFile:
    """Writes the name of each event to `lines.txt` in the run folder."""

    def __init__(self, run_folder: Path) -> None:
        self.file = (run_folder / "lines.txt").open("a")

    def __call__(self, event: object) -> None:
        print(event.step, type(event).__name__, file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()


class WatchOptions(register.Section):
    """What the callback reads of `plugin_options.watch_loss`."""

    evaluate_at: int = register.key("Evaluate after this step; 0: never.", 0, ge=0)
    save_at: int = register.key("Save after this step; 0: never.", 0, ge=0)
    stop_at: int = register.key("Stop after this step; 0: never.", 0, ge=0)
    on_rank: int = register.key("The rank that requests it; -1: all.", -1, ge=-1)
    raise_at: int = register.key("Fail after this step; 0: never.", 0, ge=0)


@register.callback("watch_loss", options=WatchOptions)
class WatchLoss:
    """Requests what its options say, after the steps that they name."""

    def __init__(self, *, options: WatchOptions) -> None:
        self.options = options

    def __call__(self, event: object) -> register.Request | None:
        import os

        if type(event).__name__ != "StepTaken":
            return None
        if event.step == self.options.raise_at:
            raise ValueError("the callback of the tests fails")
        if self.options.on_rank not in (-1, int(os.environ.get("RANK", "0"))):
            return None
        request = register.Request(0)
        for step, wanted in (
            (self.options.evaluate_at, register.Request.EVALUATE),
            (self.options.save_at, register.Request.SAVE),
            (self.options.stop_at, register.Request.STOP),
        ):
            request |= wanted if event.step == step else register.Request(0)
        return request
