import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune import __version__
from finetune.commands import check
from finetune.config.load import load_config
from finetune.run import start

COMMANDS = (
    "train",
    "check",
    "prepare",
    "preview",
    "doctor",
    "reference",
    "schema",
    "init",
    "chat",
    "verify",
    "checkpoint",
)
GROUPS = {
    "checkpoint": ("ls", "show", "verify", "prune", "export"),
    "launch": ("torchrun", "slurm", "kubernetes", "ray", "next"),
    "plugins": ("list", "test"),
    "verify": ("parity", "resume", "replay", "serving"),
}


def test_help_names_every_command(typed):
    code, said, _ = typed("--help")
    assert code == 0
    assert [name for name in (*COMMANDS, *GROUPS) if f"\n  {name} " not in said] == []


@pytest.mark.parametrize(
    "command", [*((name,) for name in COMMANDS), *((name, each) for name in GROUPS for each in GROUPS[name])]
)
def test_every_command_explains_itself(typed, command):
    code, said, _ = typed(*command, "--help")
    assert code == 0
    assert "Usage:" in said


def test_the_version_option_prints_the_version(typed):
    assert typed("--version") == (0, f"{__version__}\n", "")


def test_a_good_job_is_checked_with_the_arithmetic_of_its_batch(typed, job):
    code, said, complaint = typed("check", job, "--processes", 2)
    assert (code, complaint) == (0, "")
    assert said.startswith("job.yaml is ready.\n")
    assert "8 per step = 2 processes x 4 per microbatch x 1 accumulated" in said


def test_a_bad_job_is_one_message_and_exit_code_2(typed, job):
    job.write_text(job.read_text().replace("max_length", "max_lenght"))
    code, said, complaint = typed("check", job)
    assert (code, said) == (2, "")
    assert complaint == (
        "error: job.yaml has 1 problem\n  line 8, data.max_lenght: there is no such key. Did you mean `max_length`?\n"
    )


def test_a_batch_that_cannot_be_shared_is_found_by_check(typed, job):
    code, _, complaint = typed("check", job, "--processes", 3)
    assert code == 2
    assert "8 cannot be shared by 3 processes x 4 per microbatch. Nearest that can: 12." in complaint


def test_overrides_are_laid_over_the_file(typed, job):
    code, said, _ = typed("check", job, "--set", "train.steps=7", "--set", "train.learning_rate=5e-5")
    assert code == 0
    assert "7 steps = 56 samples, learning rate 5e-05" in said


@pytest.mark.parametrize("words", [("train", "--config"), ("--config",)])
def test_options_alone_mean_train(typed, job, calls, words):
    code, _, _ = typed(*words, job, "--set", "train.steps=7")
    ((place, arguments, named),) = calls.made
    assert code == 0
    assert place == "finetune.run.start:start"
    assert (arguments, named) == ((job, ["train.steps=7"]), {"accelerate_file": None})


def test_training_takes_an_accelerate_file_that_exists(typed, job, calls):
    file = job.with_name("fsdp2.yaml")
    assert typed("--config", job, "--accelerate", file)[0] == 2
    assert calls.made == []
    file.write_text("distributed_type: FSDP")
    assert typed("--config", job, "--accelerate", file)[0] == 0
    ((_, _, named),) = calls.made
    assert named == {"accelerate_file": file}


def test_check_with_the_model_option_builds_the_model(typed, job, monkeypatch):
    tried = []
    monkeypatch.setattr(
        check,
        "model_checks",
        SimpleNamespace(CheckedJob=lambda *job: job, check_model=lambda job: (tried.append(job), "it fits")[1:]),
    )
    code, said, _ = typed("check", job, "--model")
    assert (code, said.endswith("  it fits\n")) == (0, True)
    assert [(loaded.config.run.seed, strategy) for loaded, strategy in tried] == [
        (load_config(job).config.run.seed, None)
    ]
    assert typed("check", job)[0] == 0
    assert len(tried) == 1


def test_the_exit_code_of_the_run_is_the_exit_code(typed, job, calls):
    calls.answer = 143
    assert typed("--config", job)[0] == 143


def test_checksums_are_started_before_training_modules_are_imported(job, monkeypatch):
    trained = []
    monkeypatch.setattr("finetune.run.start.prefetch_checksums", lambda loaded: f"checksums of {loaded.path.name}")
    monkeypatch.setattr(start, "train", SimpleNamespace(train_from_config=lambda *given: trained.append(given) or 3))
    assert start.start(job, ["train.steps=7"]) == 3
    ((loaded, checksums),) = trained
    assert (loaded.config.train.steps, checksums) == (7, "checksums of job.yaml")


@pytest.mark.parametrize(("agree", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("words", "place", "named"),
    [
        (
            ("parity", "--config", "X", "--strategies", "ddp, zero3", "--steps", 5, "--accumulations", "1,4"),
            "runs:run_parity",
            {"strategies": ["ddp", "zero3"], "processes": 2, "steps": 5, "tolerance": 1e-4, "accumulations": [1, 4]},
        ),
        (
            ("resume", "--config", "X", "--stop-at", 4, "--from", "ddp:2", "--to", "zero3:4"),
            "runs:run_resume",
            {"stop_at": 4, "steps": None, "source": "ddp:2", "target": "zero3:4", "tolerance": 1e-4},
        ),
    ],
)
def test_verify_passes_its_options_and_exits_1_when_runs_differ(typed, calls, agree, code, words, place, named):
    calls.answer = agree
    assert typed("verify", *words, "--set", "run.seed=1")[0] == code
    common = {"overrides": ["run.seed=1"], "configs_folder": Path("accelerate_configs")}
    assert calls.made == [(f"finetune.commands.verify.{place}", (Path("X"),), {**named, **common})]


def test_verify_replay_passes_steps_checkpoint_and_layers_and_exits_1_when_the_steps_differ(typed, calls, tmp_path):
    calls.answer = 1
    words = ("verify", "replay", tmp_path, "--steps", 3, "--from", 400, "--layers", "--set", "train.microbatch_size=2")
    assert typed(*words)[0] == 1
    named = {"num_steps": 3, "start": 400, "layers": True, "overrides": ["train.microbatch_size=2"]}
    call = ("finetune.commands.verify.replay:run_replay", (tmp_path,), {**named, "trust_remote_code": False})
    assert calls.made == [call]


def test_verify_serving_passes_engine_and_limits_and_exits_1_when_the_models_differ(typed, calls, tmp_path):
    calls.answer = False
    options = ("--engine", "vllm:http://host:8000/v1", "--dtype", "bfloat16", "--timeout", 5)
    assert typed("verify", "serving", tmp_path, *options)[0] == 1
    (_, options, _), (place, (folder, _), _) = calls.made
    assert (place, folder) == ("finetune.commands.verify.serving:run_serving", tmp_path)
    assert options == ("vllm:http://host:8000/v1", None, None, None, "bfloat16", 5.0, False)


def test_accumulations_are_whole_numbers(typed, job, calls):
    assert typed("verify", "parity", "--config", job, "--accumulations", "1,two")[0] == 2
    assert calls.made == []


def test_chat_is_given_the_folder(typed, calls):
    assert typed("chat", "runs/first/final")[0] == 0
    settings = {
        "step": None,
        "adapters": [],
        "max_new_tokens": 256,
        "temperature": 0.0,
        "system": None,
        "template_arguments": [],
        "trust_remote_code": False,
    }
    assert calls.made == [("finetune.commands.chat:chat", (Path("runs/first/final"),), settings)]


def test_an_export_for_an_engine_passes_its_options_on(typed, calls):
    assert typed("export", "runs/first", "--for", "ollama", "--gguf", "q8_0", "--no-verify")[0] == 0
    ((place, arguments, options),) = calls.made
    assert (place, arguments) == ("finetune.commands.serving_files:export_for", (Path("runs/first"),))
    assert (options["engine_name"], options["gguf_type"], options["verify"], options["merge"]) == (
        "ollama",
        "q8_0",
        False,
        False,
    )


def test_evaluate_generate_and_export_commands_pass_their_options_on(typed, calls):
    typed("export", "runs/first", "--merge", "--step", "4", "--dtype", "bfloat16", "--push-to-hub", "me/model")
    typed("evaluate", "runs/first", "--set", "data.validation.path=a.jsonl", "--json", "m.json")
    typed("generate", "runs/first", "--input", "p.jsonl", "--output", "a.jsonl", "--temperature", "0.5")
    exported, measured, chosen, answered = calls.made
    assert exported[0] == "finetune.commands.export:export"
    assert (exported[2]["merge"], exported[2]["step"], exported[2]["push_to_hub"]) == (True, 4, "me/model")
    assert measured[2] == {
        "step": None,
        "config": None,
        "overrides": ["data.validation.path=a.jsonl"],
        "json": Path("m.json"),
        "trust_remote_code": False,
    }
    assert (answered[2]["rows"], chosen[2]["temperature"]) == (Path("p.jsonl"), 0.5)


def test_the_release_gate_gets_its_options(typed, calls):
    typed("evaluate", "runs/first", "--against", "base", "--margin", "0.1", "--json", "a.json")
    limits, compared = calls.made
    assert limits[2] == {"margin": 0.1, "max_forgetting": 0.3, "general": None, "json": Path("a.json")}
    assert compared[:2] == ("finetune.commands.gate.gate:evaluate_against", (Path("runs/first"),))
    assert compared[2]["against"] == "base"


def test_options_that_have_no_effect_on_an_evaluation_are_refused(typed, calls):
    code, _, printed = typed("evaluate", "runs/first", "--margin", "0")
    assert (code, calls.made) == (2, [])
    assert "--against" in printed


def test_the_reference_is_written_as_a_page_per_section(typed, tmp_path):
    assert typed("reference", "--into", str(tmp_path / "job"))[0] == 0
    assert "| `train.learning_rate` |" in (tmp_path / "job" / "train.md").read_text()


def test_reference_and_schema_are_printed(typed):
    assert "| `train.learning_rate` |" in typed("reference")[1]
    assert json.loads(typed("schema")[1])["title"] == "finetune job"


@pytest.mark.parametrize("words", [("check",), ("nonsense",), ("train",), ("check", "x", "--processes", "0")])
def test_an_unknown_command_exits_with_code_2(typed, words):
    code, _, complaint = typed(*words)
    assert code == 2
    assert "Error: " in complaint
