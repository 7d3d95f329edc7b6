"""Mixtures of experts with the balance loss: one set of numbers under every strategy, for every task that has it."""

import json

import pytest

from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.run.setup.model_problems import router_problems

SIZES = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
MODELS = {
    "mixtral": f"{SIZES}, intermediate_size: 32, num_local_experts: 4, num_experts_per_tok: 2",
    "glm4_moe": f"{SIZES}, intermediate_size: 64, moe_intermediate_size: 16, n_routed_experts: 8, "
    "num_experts_per_tok: 2, n_group: 2, topk_group: 1, first_k_dense_replace: 1",
}
SPREAD = [("mixtral", "fsdp2"), ("mixtral", "zero2"), ("glm4_moe", "zero3")]
SHORT = ["train.steps=4", "data.validation=null", "evaluate=null", "train.learning_rate=1e-3"]


def model(name):
    return f"model.from_config={{model_type: {name}, values: {{{MODELS[name]}}}}}"


def balance_losses(run):
    return [float(event["metrics"]["router_aux_loss"]) for event in run.events("StepTaken")]


def loads(run):
    return [
        [event["metrics"][name] for name in ("expert_load_max", "experts_unused")] for event in run.events("StepTaken")
    ]


@pytest.fixture(scope="module")
def whole(launch):
    """The runs of one process, in one microbatch per step."""
    words = [*SHORT, "train.router_aux_loss=0.1", "train.microbatch_size=8"]
    runs = {name: launch(None, name=f"experts-{name}", overrides=[*words, model(name)]) for name in MODELS}
    for run in runs.values():
        assert run.code == 0, run.output
    return runs


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "strategy"), SPREAD)
def test_losses_balance_losses_and_loads_equal_one_process(launch, whole, name, strategy):
    """Two ranks, four microbatches each: the counts of the step come from a pass before it, over both ranks."""
    words = [*SHORT, "train.router_aux_loss=0.1", "train.microbatch_size=1", model(name)]
    run = launch(strategy, name=f"experts-{name}-{strategy}", overrides=words)
    assert run.code == 0, run.output
    wanted = whole[name]
    assert run.losses() == pytest.approx(wanted.losses(), rel=1e-4)
    assert run.norms() == pytest.approx(wanted.norms(), rel=1e-4)
    assert balance_losses(run) == pytest.approx(balance_losses(wanted), rel=1e-4)
    assert loads(run) == loads(wanted)


@pytest.mark.full
def test_the_load_alone_is_logged_without_another_number_of_the_run(launch):
    plain = launch(None, name="experts-plain", overrides=[*SHORT, model("mixtral")])
    logged = launch(None, name="experts-logged", overrides=[*SHORT, model("mixtral"), "report.expert_load=true"])
    assert plain.code == logged.code == 0, plain.output + logged.output
    assert logged.losses() == plain.losses() and logged.norms() == plain.norms()
    assert all(load >= 1.0 and unused in range(9) for load, unused in loads(logged))
    assert plain.events("StepTaken")[0]["metrics"] == {}


PAIRS = [
    {"prompt": f"Say {word}.", "chosen": word, "rejected": word[::-1]} for word in ("red", "blue", "green", "pink")
]
CLASSES = [{"text": f"{word} is a color", "label": word} for word in ("red", "blue", "green", "pink")]
TASKS = {
    "kto": (PAIRS, ["task={name: preference, preference: {loss: kto}}", "train.global_batch_size=8"]),
    "text_classification": (CLASSES, ["task={name: text_classification}", "data.chat_template=null"]),
}


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_every_kind_of_task_balances_its_experts_over_the_step(launch, job, task):
    rows, words = TASKS[task]
    path = job.parent / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    words = [*SHORT, model("mixtral"), "train.router_aux_loss=auto", f"data.train.path={path}", *words]
    runs = [
        launch(None, name=f"experts-{task}-{size}", overrides=[*words, f"train.microbatch_size={size}"])
        for size in (8, 2)
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].output + runs[1].output
    one, other = runs
    assert other.losses() == pytest.approx(one.losses(), rel=1e-4)
    assert balance_losses(other) == pytest.approx(balance_losses(one), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.router_aux_loss=0.1"], "train.router_aux_loss: `llama` has no routers: it is not a mixture of"),
        (["report.expert_load=true"], "report.expert_load: `llama` has no routers"),
        (
            ["train.router_aux_loss=auto", model("glm4_moe")],
            "config of `glm4_moe` has no `router_aux_loss_coef` above 0. Write a number",
        ),
        (
            ["train.router_aux_loss=0.1", "model.from_config={model_type: phimoe, values: {num_hidden_layers: 1}}"],
            "`phimoe` is not supported: the scores of its router PhimoeTopKRouter are neither",
        ),
    ],
)
def test_a_model_whose_routers_cannot_be_balanced_is_refused_with_the_key(job, words, message):
    loaded = load_config(job, words)
    with pytest.raises(ConfigError) as refused:
        loaded.refuse(router_problems(loaded.config))
    assert message in str(refused.value)
    assert f"--set {words[0]}" in str(refused.value)


def test_a_model_that_can_be_balanced_is_not_refused(job):
    assert not list(router_problems(load_config(job, [model("mixtral"), "train.router_aux_loss=auto"]).config))
    assert not list(router_problems(load_config(job).config))
