"""A run on a machine with GPUs that are not there: the program's own start, steps, evaluation, checkpoint and export.

Of several ranks, this process is rank 0, in a process group that sends nothing (`torch.testing._internal`): what others
would send is taken from its own values. Such a run ends after its last step, since its checkpoint would lack the files
of the other ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.checkpoint.write.saver import Saver
from finetune.data import loader
from finetune.data.token_cache.integrity import SampleVerifier
from finetune.model.attention import sample_attention
from finetune.run import train as run_train
from finetune.run.in_process import isolated_run
from finetune.runtime.supervision.exit import ProcessExit
from finetune.strategy.launch_file import use_launch_file
from finetune.train import loop
from finetune.train.step import TrainingComponents
from tests.fake_gpu.device import FakeGpu, Finding
from tests.fake_gpu.machine import MACHINES, on_machine
from tests.fake_gpu.streams import Timeline
from tests.scenarios.trained import train_here

OVERRIDES = ("train.steps=3", "data.num_workers=0", "export.verify=false", "checkpoint.every_steps=2")

CPU_BUILD = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a CUDA build of torch asks the driver")
"""The mark of a test with a whole run, of which a part is in C++."""

ACCELERATE_FILES = Path(__file__).parents[2] / "accelerate_configs"


@dataclass(frozen=True)
class Launch:
    """How the processes of a run are started: by which file of Accelerate, on how many machines with so many GPUs."""

    strategy: str = "single"
    num_machines: int = 1
    num_gpus: int = 1

    @property
    def world(self) -> int:
        return self.num_machines * self.num_gpus


@dataclass
class Walk:
    """What a run has left behind."""

    folder: Path
    gpu: FakeGpu
    timeline: Timeline
    components: TrainingComponents | None = None  # that the loop was given
    groups: list[dict[str, Any]] = field(default_factory=list)  # arguments of the process groups that were opened

    @property
    def findings(self) -> dict[Finding, int]:
        """What the host waited for between the first step and the last, but for reports, evaluations and saves."""
        return self.gpu.findings


def walk(
    job: Path,
    folder: Path,
    *overrides: str,
    machine: str = "H100",
    launch: Launch = Launch(),
    inspect: Callable[[Walk], None] = lambda _: None,
    takes_steps: bool = True,
) -> Walk:
    """Run the job on such machines, as `finetune train` does; `inspect` is called after its last step.

    Without steps, it is called when everything is ready for the first one, and the run ends.
    """
    gpu = FakeGpu()
    with ExitStack() as stack:
        stack.enter_context(isolated_run())
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a mode of torch holds for one thread
        num_cores = MACHINES[machine].cores_per_gpu * launch.num_gpus
        stack.enter_context(patch.object(loader, "usable_cores", lambda: num_cores))
        stack.enter_context(
            patch.object(sample_attention, "_available", sample_attention._available)
        )  # is detected anew
        timeline = stack.enter_context(on_machine(gpu, MACHINES[machine], num_gpus=launch.num_gpus))
        walked = Walk(folder, gpu, timeline)
        if launch.strategy != "single":
            stack.enter_context(_rank_0_of(launch, walked))
        stack.enter_context(gpu)
        stack.enter_context(_watched_steps(walked, inspect, takes_steps=takes_steps, is_alone=launch.world == 1))
        train_here(job, f"run.folder={folder}", *OVERRIDES, *overrides)
    return walked


@contextmanager
def _watched_steps(
    walked: Walk, inspect: Callable[[Walk], None], *, takes_steps: bool, is_alone: bool
) -> Iterator[None]:
    """Watch the loop's steps, not what it does where a report, an evaluation or a checkpoint is due."""

    def watched(function: Callable[..., Any], *, is_watching: bool) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with walked.gpu.watching(is_watching):
                return function(*given, **named)

        return call

    train = loop.run_training_loop

    def train_and_inspect(components: TrainingComponents, *given: Any) -> str:
        walked.components = components
        reason = train(components, *given) if takes_steps else "no step is taken"
        inspect(walked)
        return reason

    with (
        patch.object(run_train, "finish_run", run_train.finish_run if is_alone and takes_steps else lambda *_, **__: 0),
        patch.object(run_train, "run_training_loop", train_and_inspect),
        patch.object(loop, "_take_steps", watched(loop._take_steps, is_watching=True)),
        patch.object(loop, "report_steps", watched(loop.report_steps, is_watching=False)),
        patch.object(loop, "_evaluate", watched(loop._evaluate, is_watching=False)),
        patch.object(loop, "_save", watched(loop._save if is_alone else _save_nothing, is_watching=False)),
    ):
        yield


def _save_nothing(components: TrainingComponents, progress: Any) -> int:
    """Take the place of `_save` where other ranks would write most of the files."""
    return int(progress.step)


@contextmanager
def _rank_0_of(launch: Launch, walked: Walk) -> Iterator[None]:
    """Be rank 0 of such a launch, in process groups that send nothing."""
    os.environ |= {
        "WORLD_SIZE": str(launch.world),
        "LOCAL_WORLD_SIZE": str(launch.num_gpus),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    use_launch_file(ACCELERATE_FILES / f"{launch.strategy}.yaml")
    begin, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, **named: Any) -> None:
        walked.groups.append({"backend": backend, **named})
        begin("fake", store=FakeStore(), rank=0, world_size=launch.world)

    def open_group(*given: Any, backend: str | None = None, **named: Any) -> Any:
        walked.groups.append({"backend": backend, **named})
        return new_group(*given, backend="fake", **named)

    ddp = DistributedDataParallel.__init__

    def build_ddp(model: Any, *given: Any, **named: Any) -> None:
        ddp(model, *given, **named)
        model.register_comm_hook(None, _sent)  # the work of such a group has no result

    def gather_object(values: list[Any], value: Any, **_: Any) -> None:
        values[:] = [value] * len(values)

    with (
        patch.object(dist, "init_process_group", init_process_group),
        patch.object(dist, "new_group", open_group),
        patch.object(ProcessExit, "exit_after_error", lambda *_: None),  # which would end the tests
        patch.object(DistributedDataParallel, "__init__", build_ddp),
        patch.object(dist, "all_gather_object", gather_object),
        patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
        patch.object(SampleVerifier, "expected", lambda *_: ANY),  # the other ranks' samples are not counted
        patch.object(Saver, "rehearse", lambda *_, **__: None),  # nor have they written a file
    ):
        yield


def _sent(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
