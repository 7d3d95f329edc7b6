"""`finetune checkpoint convert`: to and from the folder of Accelerate's `save_state` under the launched strategy.

Under DeepSpeed this is DeepSpeed's own folder. A run's checkpoint is portable. Such a folder is for tools that read
only Accelerate's or DeepSpeed's format, and can only be loaded with the same strategy and number of processes.
"""

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from torch.distributed.checkpoint.api import CheckpointException

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.find import verify_checkpoint
from finetune.checkpoint.read.inventory import locate_run, select_checkpoint
from finetune.checkpoint.read.load import load_checkpoint
from finetune.checkpoint.sharding.access import StateAccess, build_access
from finetune.checkpoint.write.writer import StateSource, write_contents
from finetune.commands.source import new_folder, with_trust
from finetune.config.load import LoadedConfig, load_resolved
from finetune.data.token_cache.integrity import digest_of_steps
from finetune.errors import CheckpointError, FinetuneError, UserError
from finetune.registry.optimizers import OPTIMIZERS
from finetune.run.context import RunContext, make_context
from finetune.run.setup.accelerator import PreparedModel, make_accelerator
from finetune.run.setup.build import prepare_model
from finetune.run.setup.data import TrainingData, prepare_data
from finetune.run.setup.strategy import launched_strategy
from finetune.run.state.resume import make_fingerprint, matches_data_order
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_all_ranks, run_on_rank_0
from finetune.runtime.files.read import open_regular, read_regular
from finetune.runtime.progress import Progress, parse_progress
from finetune.runtime.run_folder import lock_run_folder
from finetune.runtime.text.terminal import quiet_libraries
from finetune.strategy.protocol import Strategy

_MODEL = "pytorch_model"
_PICKLE_PROTOCOL = b"\x80"
"""The first byte of a file of torch before 1.6: a pickle without checksums."""


def require_accelerate_folder(folder: Path, *, strategy: Strategy, world: int) -> None:
    """Raise CheckpointError unless the folder has the files of this strategy's `load_state` for all processes.

    DeepSpeed itself only warns about missing files.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--from {folder}: this folder does not exist.")
    expected = strategy.expected
    if expected.zero_stage is not None:
        count = len(list((folder / _MODEL).glob("*zero_pp_rank_*_optim_states.pt")))
        missing = None if count == world else f"has the optimizer state of {count} ZeRO processes"
    elif expected.fsdp_version is not None:
        is_sharded = (folder / f"{_MODEL}_fsdp_0").is_dir() and (folder / "optimizer_0").is_dir()
        is_full = (folder / f"{_MODEL}_fsdp.bin").is_file() and (folder / "optimizer.bin").is_file()
        neither = f"has neither {_MODEL}_fsdp_0/ and optimizer_0/ nor their .bin files"
        missing = None if is_sharded or is_full else neither
    elif not (folder / "optimizer.bin").is_file():
        missing = "has no optimizer.bin"
    else:
        has_model = any((folder / name).is_file() for name in ("model.safetensors", f"{_MODEL}.bin"))
        missing = None if has_model else "has no model.safetensors"
    if missing is not None:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"--from {folder}: {missing}, so it was not written under {strategy.name} with {world} "
            f"process{'' if world == 1 else 'es'}. It contains: {names}. Launch with the strategy that wrote it."
        )


NOT_IN_FOLDER = (
    "such a folder does not contain the data position, the digest of the samples, the last evaluation or the identity "
    "of the run"
)


@dataclass(frozen=True)
class Conversion:
    """A run built under the launched strategy, and the folder of its checkpoints."""

    context: RunContext
    checkpoints: Path
    training_data: TrainingData
    prepared: PreparedModel

    def access(self) -> StateAccess:
        """Return access to the current state; DeepSpeed replaces tensors when it loads."""
        return build_access(self.prepared.accelerator, self.prepared.model, self.prepared.optimizer)


def convert(
    run: Path, *, to: Path | None, source: Path | None, step: int | None, trust_remote_code: bool = False
) -> int:
    """Write a checkpoint as Accelerate's own folder, or read one from `source`; return the exit code. Collective.

    Exactly one of `to` and `source` is given, and with `source` the step.
    """
    quiet_libraries(is_main=distributed.is_main())
    if to is not None:
        convert_to(run, to, step=step, trust_remote_code=trust_remote_code)
    else:
        assert source is not None and step is not None, "the command line requires both"
        convert_from(run, source, step=step, trust_remote_code=trust_remote_code)
    return distributed.shut_down(0)


def convert_to(run: Path, folder: Path, *, step: int | None, trust_remote_code: bool = False) -> None:
    """Write a checkpoint of the run as Accelerate's own folder. Collective over all launched processes.

    Raises UserError where the folder already exists.
    """
    location, folder = locate_run(run), new_folder(folder.expanduser())
    chosen = select_checkpoint(location, step=step)
    loaded, strategy = _launched(location.run, trusts=trust_remote_code)
    conversion = _build(loaded, strategy, checkpoints=location.checkpoints)
    progress = load_checkpoint(verify_checkpoint(chosen), access=conversion.access())
    # The folder appears complete: it is staged, written and renamed.
    staging = folder.with_name(f".{folder.name}.staging")

    def stage() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def finish() -> None:
        (staging / layout.PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        staging.rename(folder)

    run_on_rank_0(stage)
    if hasattr(conversion.prepared.model, "global_steps"):  # DeepSpeed's own count, which starts at 0 in a new engine
        conversion.prepared.model.global_steps = int(progress["step"])
    conversion.prepared.accelerator.save_state(str(staging))
    distributed.barrier()  # `save_state` returns without one: other ranks may still be writing
    run_on_rank_0(finish)
    folder_kind = (
        "DeepSpeed's own" if hasattr(conversion.prepared.model, "zero_optimization_stage") else "Accelerate's own"
    )
    conversion.context.log(f"wrote {chosen.name} as {folder_kind} folder {folder}")
    conversion.context.log(f"{NOT_IN_FOLDER}; {layout.PROGRESS} was added, so that --from can restore them")
    world = distributed.world()
    origin_text = f"{conversion.context.strategy.name} with {world} process{'' if world == 1 else 'es'}"
    conversion.context.log(f"it can only be read under {origin_text}")


def convert_from(run: Path, folder: Path, *, step: int, trust_remote_code: bool = False) -> None:
    """Write Accelerate's own folder, taken after `step` steps of this run, as a checkpoint of it.

    The folder must have been written under the launched strategy and number of processes. Reading it unpickles: this is
    safe for plain files, but those of DeepSpeed and torch.distributed can run code, so they need `trust_remote_code`.
    Raises UserError or CheckpointError if the folder cannot be read. Collective over all launched processes.
    """
    location, folder = locate_run(run), folder.expanduser().absolute()
    if step in layout.steps(location.checkpoints):
        raise UserError(f"--step {step}: {layout.step_folder(location.checkpoints, step)} already exists.")
    loaded, strategy = _launched(location.run, trusts=trust_remote_code)
    expected = strategy.expected
    if not trust_remote_code and (expected.zero_stage is not None or expected.fsdp_version is not None):
        raise UserError(
            f"--from {folder}: under {strategy.name} such a folder is unpickled, which can run code of its author. "
            "If you trust it, add --trust-remote-code."
        )
    require_accelerate_folder(folder, strategy=strategy, world=distributed.world())
    with lock_run_folder(location.run, log=print) if distributed.is_main() else nullcontext():
        _read_folder(folder, _build(loaded, strategy, checkpoints=location.checkpoints), step=step)


def _read_folder(folder: Path, conversion: Conversion, *, step: int) -> None:
    """Load the folder into the prepared model and optimizer, and write their state as a checkpoint. Collective."""
    run_on_all_ranks(lambda: require_intact_archives(folder))
    if conversion.context.strategy.expected.fsdp_version == 1:
        conversion.access().begin_writing()  # torch loads FSDP1's optimizer state only into an existing one
    try:
        conversion.prepared.accelerator.load_state(str(folder))
    except (FinetuneError, KeyboardInterrupt, torch.AcceleratorError):
        raise
    except (
        Exception,
        CheckpointException,
    ) as error:  # of libraries that read a damaged file; CheckpointException is not an Exception
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise CheckpointError(
            f"--from {folder}: Accelerate cannot load it ({type(error).__name__}: {reason}). It is damaged, or of "
            "another model. Nothing was written."
        ) from error
    distributed.barrier()  # no rank requests tensors of others that are still loading
    access = conversion.access()
    counts_updates = OPTIMIZERS[conversion.context.config.train.optimizer.name].counts_updates
    # A state without updates, or with more updates than steps, means that loading failed.
    states = distributed.gather_objects(access.read_scalars())
    most = max((numbers.get("step", 0.0) for scalars in states for numbers in scalars.values()), default=0.0)
    if most > step or (most == 0 and counts_updates):
        raise CheckpointError(
            f"{folder}: its optimizer has taken {most:.0f} steps, so this is not the state after step {step}."
        )
    progress = _progress(folder, conversion, step=step)
    manifest = write_contents(
        conversion.checkpoints,
        StateSource(access, copies=False).capture(step, progress=progress.state_dict()),
        run=_fingerprint(conversion),
    )
    conversion.context.log(f"wrote {layout.step_folder(conversion.checkpoints, manifest.step)}")


def require_intact_archives(folder: Path) -> None:
    """Raise CheckpointError for a file of `torch.save` that is truncated or has wrong checksums.

    torch does not verify checksums when it loads, and one rank that fails to load makes the others hang in a
    collective. Each rank reads its share of the files.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".pt", ".bin", ".pkl"))
    for path in paths[distributed.rank() :: distributed.world()]:
        try:
            with open_regular(path) as file:
                damaged = None if file.read(1) == _PICKLE_PROTOCOL else ZipFile(file).testzip()
        except (OSError, BadZipFile) as error:
            reason = (
                error.strerror if isinstance(error, OSError) else "it is truncated, or was not written by torch.save"
            )
            raise CheckpointError(f"--from {folder}: {path.name} is damaged: {reason}. Nothing was written.") from error
        if damaged is not None:
            raise CheckpointError(
                f"--from {folder}: {path.name} is damaged: the checksum of {damaged} in it does not match. Nothing was "
                "written."
            )


def _launched(run: Path, *, trusts: bool) -> tuple[LoadedConfig, Strategy]:
    """Return the run's job and the strategy that was launched."""
    loaded = with_trust(load_resolved(run), trust_remote_code=trusts)
    strategy = launched_strategy(_with_smallest_microbatch(loaded))
    if strategy.expected.tensor_size > 1:
        raise UserError(
            "convert: Accelerate reads no folder into split layers. Launch with accelerate_configs/ddp.yaml."
        )
    return loaded, strategy


def _build(loaded: LoadedConfig, strategy: Strategy, *, checkpoints: Path) -> Conversion:
    small = make_context(_with_smallest_microbatch(loaded), strategy)
    data = prepare_data(small)
    prepared = prepare_model(
        small.loaded,
        strategy,
        data,
        accelerator=make_accelerator(small.config, strategy, log=small.log),
        log=small.log,
        trains=False,
    )
    return Conversion(replace(small, loaded=loaded), checkpoints, data.training_data, prepared)


def _with_smallest_microbatch(loaded: LoadedConfig) -> LoadedConfig:
    """Return the job with microbatches of 1: nothing is trained, and more processes can divide its batch."""
    train = loaded.config.train.model_copy(update={"microbatch_size": 1})
    return replace(loaded, config=loaded.config.model_copy(update={"train": train}))


def _progress(folder: Path, conversion: Conversion, *, step: int) -> Progress:
    """Return the progress in the folder if its step and data match, else progress that is derived from the step."""
    training_data = conversion.training_data
    batch_size = conversion.context.config.train.global_batch_size
    state = run_on_rank_0(lambda: _read_progress(folder))
    is_step = state is not None and state.step == step
    if state and is_step and matches_data_order(state, pool=training_data.training, global_batch_size=batch_size):
        return state
    conversion.context.log(
        f"{NOT_IN_FOLDER}. Position and digest are derived from --step {step} and the order of the data; the counts of "
        "tokens, targets, skipped steps and seconds start at 0, and early stopping is reset"
    )
    return Progress(
        step=step, samples_sha256=digest_of_steps(training_data.training, step, global_batch_size=batch_size)
    )


def _read_progress(folder: Path) -> Progress | None:
    """Return the progress in the folder; None if it cannot be read."""
    try:
        return parse_progress(read_regular(folder / layout.PROGRESS))
    except (OSError, ValueError):
        return None


def _fingerprint(conversion: Conversion) -> RunFingerprint:
    context, model = conversion.context, conversion.prepared.unwrapped_model
    return make_fingerprint(context.config, context.strategy, conversion.training_data, model=model, log=context.log)
