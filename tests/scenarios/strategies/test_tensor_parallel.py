"""Ranks that share the matrices of every layer train as one process does."""

import json
import random
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from finetune.model.tensor_parallel import TENSOR_PARALLEL_TYPES
from finetune.registry.losses import PREFERENCE_LOSSES
from tests import launching
from tests.scenarios.conftest import Ended
from tests.small_job import reversal, write_rows

pytestmark = pytest.mark.distributed
full = pytest.mark.full

SETTINGS = ("train.steps=8", "train.microbatch_size=4", "report.sample_ids=true")
SHORT = ("data.train.take=8", "train.steps=4", "checkpoint.every_steps=null", "train.try_longest_batch=never")
"""Four steps with the same rows, whose loss falls."""


def assert_equal(run, wanted):
    assert run.code == 0, run.output
    assert run.losses() == pytest.approx(wanted.losses(), abs=1e-5)
    assert run.norms() == pytest.approx(wanted.norms(), rel=1e-4)
    assert run.last_metrics()["loss"] == pytest.approx(wanted.last_metrics()["loss"], abs=1e-5)
    for count in ("num_targets", "num_tokens", "samples_sha256"):
        assert [event[count] for event in run.events("StepTaken")] == [
            event[count] for event in wanted.events("StepTaken")
        ]


def assert_same_export(run, wanted, tolerance=1e-4):
    exported, expected = (load_file(ended.folder / "final" / "model.safetensors") for ended in (run, wanted))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=tolerance, msg=f"{run.folder.name}: {name}")


def test_two_tensor_parallel_ranks_have_the_losses_of_one_process(launch):
    alone = launch(None, name="tp-alone", overrides=SETTINGS)
    run = launch("tensor_parallel", name="tp", overrides=SETTINGS)
    assert "tp on 2 processes" in run.output
    assert_equal(run, alone)
    assert run.samples() == alone.samples()
    assert len(run.losses()) == 8


LORA = ("model.lora={rank: 4, alpha: 8, init: gaussian}", "train.learning_rate=2e-2")
DROPOUT = "model.lora={rank: 4, alpha: 8, init: gaussian, dropout: 0.3}"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SHAPES = {
    **{model_type: {"head_dim": 8} for model_type in ("gemma", "gemma2", "gemma3_text")},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {**EXPERTS, "intermediate_size": 16},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 16},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"pad_token_id": 0},
}
"""By model type, the values of its config that differ from those of the small job."""


def settings_of(model_type):
    """Return the overrides that make the small job one of this model type."""
    values = SHAPES.get(model_type, {}).items()
    shape = [f"model.from_config.values.{key}={json.dumps(value)}" for key, value in values]
    return [f"model.from_config.model_type={model_type}", *shape]


def jobs_of_every_type():
    """Return the overrides of a run per model type, in full and with LoRA, by the name of the run."""
    jobs = {}
    for model_type in sorted(TENSOR_PARALLEL_TYPES):
        model = settings_of(model_type)
        for name, method in (("full", ()), ("lora", (LORA[0], "train.learning_rate=5e-3", "export.merge=true"))):
            jobs[f"{model_type}-{name}"] = [*SHORT, *model, *method]
    return jobs


def alternating(jobs):
    """Return the first of two jobs, the second of the next two, and so on: one of each kind, each method for half."""
    return dict(pair for number, pair in enumerate(jobs.items()) if number % 4 in (0, 3))


LAUNCHES = {
    "alone": lambda *words: [sys.executable, *words],
    "data": partial(launching.accelerate_command, "fsdp2"),
    "split": partial(launching.accelerate_command, "tensor_parallel"),
    "sharded": partial(launching.accelerate_command, "fsdp2_tensor_parallel", processes=4),
}
"""Layouts: one process; two ranks with samples of their own; with parts of layers; two such groups."""


def train_all(job, jobs, launched, folder):
    """Train the jobs in one process after the other, or in the same ranks; return the ended runs by their names.

    With a cache of their own, so that what is precomputed is computed in this layout.
    """
    cache = f"data.cache_folder={folder}/{launched}/cache"
    words = [[f"run.folder={folder}/{launched}/{name}", cache, *overrides] for name, overrides in jobs.items()]
    command = LAUNCHES[launched]("-m", "tests.scenarios.several_jobs", str(job), json.dumps(words))
    log = folder / f"{launched}.log"
    code = launching.run(command, log=log, timeout_seconds=900)
    assert code == 0, log.read_text()[-4000:]
    return {name: Ended(0, "", folder / launched / name) for name in jobs}


@full
def test_every_model_type_has_the_losses_and_the_export_of_one_process(job, tmp_path):
    """One of full training and LoRA on two ranks, and the other one on four under FSDP2."""
    jobs = jobs_of_every_type()
    alone_runs = train_all(job, jobs, "alone", tmp_path)
    split = alternating(jobs)
    sharded = {name: words for name, words in jobs.items() if name not in split}
    compared = train_all(job, split, "split", tmp_path) | train_all(job, sharded, "sharded", tmp_path)
    assert len(compared) == 2 * len(TENSOR_PARALLEL_TYPES) >= 32
    for name, run in compared.items():
        alone = alone_runs[name]
        assert_equal(run, alone)
        assert run.losses()[-1] < run.losses()[0] - 0.005, f"{name} is trained"
        assert_same_export(run, alone, tolerance=2e-4)


def settings_jobs(folder):
    """Return the overrides of runs with other settings, and of one from the weights of another run, by their names."""
    unfrozen = (
        "train.average={decay: 0.5, after_steps: 2}",
        "train.unfreeze=[{patterns: ['*mlp*', '*embed*'], after_steps: 3}]",
    )
    jobs = {
        "accumulation": ("train.global_batch_size=6", "train.microbatch_size=1", "train.max_gradient_norm=0.1"),
        "packs": (
            "data.batching={by: packs, tokens: 128}",
            "model.gradient_checkpointing=true",
            "train.optimizer.name=sgd",
        ),
        "uneven": (
            "model.from_config.values={hidden_size: 36, intermediate_size: 66, num_hidden_layers: 2, "
            "num_attention_heads: 6, num_key_value_heads: 2, head_dim: 6}",
            "model.freeze=['*embed*', '*q_norm*']",
        ),
        "unfrozen": unfrozen,
        "bf16": ("train.microbatch_size=2", "train.precision=bf16"),
        "base": (),
        "answers": (
            *unfrozen,
            "train.microbatch_size=auto",
            "model.from_config=null",
            "model.tokenizer=null",
            f"model.name={folder}/alone/base/final",
            "evaluate.generate={num_samples: 5, max_new_tokens: 12, batch_size: 2, show: 5}",
        ),
    }
    return {name: [*SETTINGS, "model.from_config.model_type=qwen3", *words] for name, words in jobs.items()}


@full
def test_settings_have_the_losses_of_one_process(job, tmp_path):
    """On two ranks and on four; of `answers` rank 0 alone reads the weights, and the microbatch is the largest."""
    jobs = settings_jobs(tmp_path)
    alone = train_all(job, jobs, "alone", tmp_path)
    for launched in ("split", "sharded"):
        runs = train_all(job, jobs, launched, tmp_path)
        assert runs["bf16"].losses() == pytest.approx(alone["bf16"].losses(), rel=0.01)
        assert runs["bf16"].losses()[-1] < 0.95 * runs["bf16"].losses()[0]
        for name in jobs.keys() - {"bf16"}:
            assert_equal(runs[name], alone[name])
        answers, wanted = (
            [event["answer"] for event in ended["answers"].events("Answered")] for ended in (runs, alone)
        )
        assert answers == wanted and len(set(answers)) > 1 and all(answers)
        assert "train.microbatch_size: auto: " in (tmp_path / f"{launched}.log").read_text()


RANDOM_JOBS = {
    "qwen3-checkpointing": (DROPOUT, "model.from_config.model_type=qwen3", "model.gradient_checkpointing=true"),
    "packs": (DROPOUT, "data.batching={by: packs, tokens: 128}"),
    "noise": ("train.embedding_noise=5.0",),
    "dora": (DROPOUT.replace("0.3", "0.3, dora: true"), "model.from_config.model_type=qwen2", "export.merge=true"),
    "routers": ("train.router_aux_loss=0.1", "train.global_batch_size=16", *settings_of("mixtral")),
    "dora-packed": (DROPOUT.replace("0.3", "0.3, dora: true"), *settings_of("glm4")),
}
"""Jobs that draw random numbers in every step, DoRA, and the loss of routers."""


@full
def test_dropout_noise_dora_and_router_losses_are_those_of_the_same_data_ranks_without_split_layers(job, tmp_path):
    """Two ranks with parts of layers against one process, two groups of two against FSDP2 on two ranks."""
    compared = []
    for plain, split, size in (("alone", "split", 4), ("data", "sharded", 2)):
        settings = (*SHORT, f"train.microbatch_size={size}", "train.learning_rate=1e-2", "data.train.take=null")
        jobs = {name: [*settings, *words] for name, words in RANDOM_JOBS.items()}
        wanted, runs = (train_all(job, jobs, launched, tmp_path) for launched in (plain, split))
        compared += [(name, run, wanted[name]) for name, run in runs.items()]
    for name, run, wanted in compared:
        assert_equal(run, wanted)
        assert run.losses()[-1] < run.losses()[0] - 0.02, f"{name} is trained"
        exported, expected = (load_file(next(ended.folder.glob("final/*model.safetensors"))) for ended in (run, wanted))
        assert exported.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(exported[key], tensor, rtol=0, atol=1e-4, msg=f"{name}: {key}")


@full
def test_every_preference_loss_has_the_values_of_one_process(job, tmp_path):
    """All weights on two ranks and LoRA, whose reference is the model without adapters, on two groups of two.

    For every other loss, the other way round.
    """
    chance = random.Random(3)
    for name, count in (("pairs.jsonl", 48), ("held_out_pairs.jsonl", 7)):
        rows = [reversal(chance)["messages"] for _ in range(count)]
        write_rows(
            tmp_path / name,
            (
                {"prompt": [ask], "chosen": [answer], "rejected": [{**answer, "content": f"{answer['content']} red"}]}
                for ask, answer in rows
            ),
        )
    data = (
        f"data.train={{path: {tmp_path}/pairs.jsonl}}",
        f"data.validation={{path: {tmp_path}/held_out_pairs.jsonl}}",
    )
    settings = (*SHORT, "train.steps=3", "train.microbatch_size=2", "task={name: preference}")
    noisy = {"robust": ["task.preference.label_smoothing=0.1"]}
    jobs = {
        f"{loss}-{method}": [*settings, *data, f"task.preference.loss={loss}", *noisy.get(loss, []), *words]
        for loss in PREFERENCE_LOSSES.choices
        for method, words in (("full", ("train.learning_rate=5e-3",)), ("lora", (LORA[0],)))
    }
    assert len(jobs) == 2 * len(PREFERENCE_LOSSES.choices) >= 18
    alone = train_all(job, jobs, "alone", tmp_path)
    split = alternating(jobs)
    sharded = {name: words for name, words in jobs.items() if name not in split}
    for runs in (train_all(job, split, "split", tmp_path), train_all(job, sharded, "sharded", tmp_path)):
        for name, run in runs.items():
            assert_equal(run, alone[name])
            for metric, value in alone[name].last_metrics().items():
                assert run.last_metrics()[metric] == pytest.approx(value, abs=1e-4), f"{name}: {metric}"


@full
def test_two_copies_of_a_group_have_the_losses_of_one_process(launch):
    """Four ranks without FSDP2; then the same run goes on under one group, and under two again."""
    overrides = [*SETTINGS, "train.max_gradient_norm=0.5", "model.from_config.model_type=qwen3"]
    alone = launch(None, name="tp-alone-copies", overrides=overrides)
    overrides += ["train.microbatch_size=1", "checkpoint.every_steps=2"]
    for processes, last in ((4, 2), (2, 4), (4, 8)):
        stop = [f"train.stop_after_steps={last}"] if last < 8 else []
        run = launch("tensor_parallel", name="tp-copies", processes=processes, overrides=[*overrides, *stop])
        assert run.code == 0, run.output
    assert "tp on 4 processes splits parameters, gradients and optimizer state, shares layers over groups of 2" in (
        run.output
    )
    assert_equal(run, alone)


@full
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(launch):
    run = launch(
        "tensor_parallel",
        name="tp-nan",
        overrides=[*SETTINGS, "train.nonfinite.action=skip", "train.steps=4"],
        faults="forward step=2 rank=1 do=nan",
    )
    assert run.code == 0, run.output
    (skipped,) = run.events("StepSkipped")
    assert skipped["step"] == 3
