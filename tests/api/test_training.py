"""`train` in one process, in launched ranks, and in ranks that it starts; and the functions next to it."""

import hashlib
import json
import sys

import pytest

import finetune
from finetune import CheckpointError, Job, RunResult, UserError
from finetune.report.events import Event, StepTaken
from finetune.runtime.processes import free_loopback_port
from tests.api.jobs import rows, sections
from tests.launching import ROOT, capture

LAUNCH_SECONDS = 400.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of a job that was written in Python, trained in this process."""
    return finetune.train(Job(**sections(tmp_path_factory.mktemp("python"))))


def digest(result: RunResult) -> str:
    assert result.final is not None
    return hashlib.sha256((result.final / "model.safetensors").read_bytes()).hexdigest()


def test_a_python_job_trains_evaluates_answers_and_exports(trained, tmp_path):
    assert (trained.reason, trained.num_steps, trained.is_finished) == ("finished", 4, True)
    assert finetune.evaluate(trained.folder) == pytest.approx(dict(trained.metrics))
    assert finetune.evaluate(trained.folder, step=2) != trained.metrics
    asked = ["reverse: red", [{"role": "user", "content": "reverse: red"}], {"prompt": "reverse: red"}]
    answers = finetune.generate(trained.final, asked, max_new_tokens=4)
    assert len(answers) == 3 and len(set(answers)) == 1
    exported = finetune.export(trained.folder, to=tmp_path / "model", step=2, verify=False)
    assert exported == tmp_path / "model" and (exported / "model.safetensors").is_file()


def test_a_python_job_gives_the_numbers_of_its_file_on_the_command_line(trained, tmp_path):
    job = Job(**sections(tmp_path)).save(tmp_path / "job.yaml")
    done = capture([sys.executable, "-m", "finetune", "--config", str(job)])
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256((tmp_path / "run/final/model.safetensors").read_bytes()).hexdigest() == digest(trained)


def test_preparing_tokenizes_and_returns_the_audit(tmp_path, capsys):
    audit = finetune.prepare(sections(tmp_path))
    assert [source["key"] for source in audit["sources"]] == ["data.train"]
    assert audit["validation"] is not None
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "already prepared" not in capsys.readouterr().out


def test_a_run_resumes_with_the_same_rows_and_refuses_others(tmp_path):
    job = Job(**sections(tmp_path))
    stopped = finetune.train(job, overrides={"train.stop_after_steps": 2})
    assert (stopped.is_finished, stopped.num_steps, stopped.final) == (False, 2, None)
    changed = sections(tmp_path)
    changed["data"] = {**changed["data"], "train": rows(seed=5)}
    with pytest.raises(CheckpointError, match="training data"):
        finetune.train(Job(**changed))
    assert finetune.train(Job(**sections(tmp_path))).num_steps == 4


def test_reporters_see_every_step(tmp_path):
    steps: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepTaken):
            steps.append(event.step)

    finetune.train(Job(**sections(tmp_path)), reporters=[watch])
    assert steps == [1, 2, 3, 4]
    with pytest.raises(UserError, match="`int` cannot be called"):
        finetune.train(Job(**sections(tmp_path)), reporters=[3])  # type: ignore[list-item]


@pytest.mark.full
@pytest.mark.distributed
def test_a_script_under_accelerate_launch_trains_twice_on_all_ranks(tmp_path, trained):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", "2"]
    command += ["--main_process_port", str(free_loopback_port()), "-m", "tests.api.launched_program", str(tmp_path)]
    done = capture(command, timeout_seconds=LAUNCH_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["reasons"] == ["finished", "finished"]
    assert first["metrics"] == pytest.approx(dict(trained.metrics), rel=1e-4)
    assert first["evaluated"] == pytest.approx(first["metrics"])
    assert not first["has_group"] and first["is_environment_unchanged"]
    assert first["error"].startswith("ConfigError: the job has 1 problem")
    assert len(first["answers"]) == 2


@pytest.mark.distributed
def test_a_plain_process_starts_ranks_of_its_own(tmp_path, trained, capfd):
    """The result is read from the folder; an error of a rank is raised, and not printed."""
    job = Job(**sections(tmp_path))
    result = finetune.train(job, num_processes=2, accelerate="ddp")
    assert (result.reason, result.num_steps, result.final) == ("finished", 4, tmp_path / "run" / "final")
    assert result.metrics == pytest.approx(dict(trained.metrics), rel=1e-4)
    output = capfd.readouterr().out
    assert "ddp on 2 processes" in output
    bad = {"run.folder": str(tmp_path / "bad"), "train.global_batch_size": 9, "train.microbatch_size": 3}
    with pytest.raises(UserError, match=r"9 cannot be shared by 2 processes"):
        finetune.train(job, overrides=bad, num_processes=2)
    captured = capfd.readouterr()
    assert "error:" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0}, "num_processes: 0 is not a number of processes"),
        ({"num_processes": 2, "reporters": [print]}, "events are in other processes"),
        ({"accelerate": "zero9"}, "Did you mean"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        finetune.train(Job(**sections(tmp_path)), **arguments)


def test_processes_of_a_launcher_start_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="a launcher has started this process already"):
        finetune.train(Job(**sections(tmp_path)), num_processes=2)
