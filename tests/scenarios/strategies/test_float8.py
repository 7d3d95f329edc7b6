"""`train.precision: fp8`, emulated: the losses of bf16, plain weights in checkpoints and exports, refusals."""

import json
from importlib import resources
from pathlib import Path
from statistics import mean

import pytest
import yaml
from safetensors.torch import load_file

from finetune.config.load import load_config
from finetune.errors import StrategyError
from finetune.recipes.quickstart import quickstart_files
from finetune.run.setup.strategy import job_settings
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.reconcile import refuse_conflicts

QUICKSTART = yaml.safe_load((resources.files("finetune.recipes") / "quickstart.yaml").read_text())
SHORT = [
    f"model={json.dumps(QUICKSTART['model'])}",
    *("data.train.path=quickstart_train.jsonl", "data.validation.path=quickstart_held_out.jsonl", "data.max_length=64"),
    *("train.global_batch_size=64", "train.microbatch_size=16", "train.learning_rate=1.5e-3", "train.steps=50"),
    *("evaluate.every_steps=50", "checkpoint.every_steps=20"),
]
FP8 = [*SHORT, "train.precision=fp8", "train.fp8={emulate: true}"]
BF16 = [*SHORT, "train.precision=bf16"]
ANY_PRECISION = "checkpoint.allow_changes=[train.precision]"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_losses_stay_within_2_percent_of_bf16_and_checkpoints_resume_in_either_precision(job, launch):
    """The model, data and learning rate of the quickstart, over its steepest steps."""
    pytest.importorskip("torchao", reason="torchao is not installed: it prints to stderr in every run")
    for name, text in quickstart_files().items():
        (job.parent / f"quickstart_{name}").write_text(text)
    plain = launch("fsdp2", name="bf16", overrides=BF16)
    runs = {
        "tensorwise": launch("fsdp2", name="fp8", overrides=FP8),
        "rowwise": launch(None, name="rowwise", overrides=[*FP8, "train.fp8.recipe=rowwise"]),
    }
    for recipe, run in runs.items():
        assert run.code == 0, run.output
        assert f"14 linear layers multiply in 8 bits while they train ({recipe}, emulated)" in run.output
        assert run.losses() != plain.losses()
        assert mean(run.losses()[-10:]) == pytest.approx(mean(plain.losses()[-10:]), rel=0.02)
        assert run.last_metrics()["loss"] == pytest.approx(plain.last_metrics()["loss"], rel=0.02)
    for file in ("final/model.safetensors", "checkpoints/step-000050/model"):
        ours, theirs = (_tensors(run.folder / file) for run in (runs["tensorwise"], plain))
        assert ours and ours == theirs
    parts = [
        launch("fsdp2", name="parts", overrides=[*FP8, "train.stop_after_steps=20"]),
        launch(None, name="parts", overrides=[*BF16, ANY_PRECISION, "train.stop_after_steps=20"]),
        launch(None, name="parts", overrides=[*FP8, ANY_PRECISION]),
    ]
    assert [part.code for part in parts] == [0, 0, 0], parts[-1].output
    assert mean(parts[-1].losses()[-10:]) == pytest.approx(mean(plain.losses()[-10:]), rel=0.02)


def _tensors(path: Path) -> dict[str, tuple]:
    """Return shape and dtype of the tensors by name, of a file or all of a folder's."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    return {name: (tuple(each.shape), each.dtype) for file in files for name, each in load_file(file).items()}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"zero_stage": 2}, "fp8 does not work under ZeRO"),
        ({"has_device": False}, "fp8 needs a GPU of compute capability 8.9 or newer, but this machine has none"),
    ],
)
def test_8_bits_are_refused_with_one_message_where_they_do_not_work(job, environment, message):
    settings = job_settings(load_config(job, ["train.precision=fp8"]).config)
    with pytest.raises(StrategyError, match=message) as refused:
        refuse_conflicts("any", LaunchEnvironment(**{"world": 2, "has_device": True, **environment}), settings)
    assert "in 1 point" in str(refused.value)


def test_emulated_products_need_no_gpu(job):
    settings = job_settings(load_config(job, ["train.precision=fp8", "train.fp8={emulate: true}"]).config)
    refuse_conflicts("any", LaunchEnvironment(world=2, has_device=False, is_fsdp=True), settings)
