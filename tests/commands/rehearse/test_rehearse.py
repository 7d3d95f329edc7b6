"""A mistake in a job shows in the phase that it breaks; a correct job is killed, resumed, exported and verified."""

import json
import sys
from pathlib import Path

import pytest

from finetune.commands.rehearse.rehearse import RehearseRequest, rehearse
from tests import launching
from tests.commands.rehearse.planted import REFUSING, command, write_job

SECONDS = 900.0


def rehearsed(job, capsys, *overrides, **changes):
    request = RehearseRequest(job, overrides, job.parent / "accelerate.yaml", 2, 4, None, time_limit_minutes=10.0)
    code = rehearse(RehearseRequest(**{**request.__dict__, **changes}), is_json=False)
    return code, capsys.readouterr().out


def launched(job, *words, **environment):
    ended = launching.capture([sys.executable, *command(job, *words)], timeout_seconds=SECONDS, environment=environment)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("override", "phase", "message"),
    [
        ("train.learning_rat=1", "job", "--set train.learning_rat=1, train.learning_rat: there is no such key"),
        ("train.global_batch_size=24", "job", "24 cannot be shared by 16 processes x 4 per microbatch"),
        ("model.lora.layers=[32]", "model", "there is no adapter on layer 32"),
        ("model.lora.target_modules=[q_prj]", "model", "no module is named `q_prj`. Did you mean `q_proj`"),
        ("data.train.path=missing.jsonl", "job", "missing.jsonl"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_launched(tmp_path, capsys, override, phase, message):
    code, out = rehearsed(write_job(tmp_path), capsys, override)
    assert code == 2 and f"rehearse: {phase} ... FAILED" in out and message in out


def test_a_damaged_row_is_reported_with_its_line(tmp_path, capsys):
    code, out = rehearsed(write_job(tmp_path, last='{"prompt": "cut off\n'), capsys)
    assert code == 2 and "rehearse: model ... ok" in out
    assert "rehearse: data ... FAILED" in out and "rows.jsonl, line 201: not valid JSON" in out


def test_an_error_of_the_template_is_reported(tmp_path, capsys):
    job = write_job(tmp_path, template=REFUSING)
    code, out = rehearsed(job, capsys, "data.system_prompt=Be brief.")
    assert code == 2 and "rehearse: data ... ok" in out
    assert "rehearse: template ... FAILED" in out and "no system message" in out


def test_a_row_that_is_too_long_is_found_even_if_it_is_the_last(tmp_path, capsys):
    last = json.dumps({"prompt": "a", "completion": "long " * 200}) + "\n"
    code, out = rehearsed(write_job(tmp_path, last=last), capsys, "data.over_length=refuse")
    assert code == 2 and "rehearse: template ... FAILED" in out and "max_length" in out


def test_a_folder_to_keep_is_never_overwritten(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with pytest.raises(Exception, match="the folder is not empty"):
        rehearse(
            RehearseRequest(write_job(tmp_path), (), tmp_path / "accelerate.yaml", 2, 4, tmp_path / "kept", 1.0),
            is_json=False,
        )


@pytest.mark.full
@pytest.mark.distributed
def test_an_error_of_the_strategy_is_that_of_the_run(tmp_path):
    job = write_job(tmp_path)
    path = tmp_path / "accelerate.yaml"
    path.write_text(path.read_text().replace("'no'", "bf16"))
    code, out = launched(job)
    assert code == 2 and "rehearse: template ... ok" in out
    assert "rehearse: strategy ... FAILED: the job and the accelerate config contradict each other in 1 point" in out
    assert "mixed_precision: bf16, but the job sets train.precision: fp32" in out
    log = Path(next(line for line in out.splitlines() if line.startswith("logs of the run: ")).partition(": ")[2])
    assert "contradict each other" in log.read_text()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_a_checkpoint_that_cannot_be_written_fails_the_checkpoint_phase(tmp_path):
    attempts = "; ".join(["save.write step=2 do=no_space"] * 3)
    code, out = launched(write_job(tmp_path), FINETUNE_FAULTS=attempts)
    assert code != 0 and "rehearse: template ... ok" in out
    assert "rehearse: checkpoint ... FAILED: " in out and "No space left on device" in out


@pytest.mark.full
@pytest.mark.distributed
def test_an_export_that_cannot_be_written_fails_the_export_phase_and_leaves_the_real_folder_alone(tmp_path):
    code, out = launched(write_job(tmp_path), FINETUNE_FAULTS="export.write do=no_space")
    assert code == 1
    for phase in ("job", "model", "data", "template", "strategy", "steps", "checkpoint", "resume"):
        assert f"rehearse: {phase} ... ok" in out
    assert "rehearse: export ... FAILED: " in out and "No space left on device" in out
    assert not (tmp_path / "real").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_a_correct_job_is_verified_from_its_data_to_its_export(tmp_path):
    kept = tmp_path / "kept"
    code, out = launched(write_job(tmp_path), "--json", "--keep", str(kept))
    assert code == 0, out
    report = json.loads(out[out.index("{") : out.rindex("}") + 1])
    replaced = {change["key"]: change for change in report["replaced"]}
    assert replaced["num_processes"]["was"] == 16 and replaced["config.num_hidden_layers"]["now"] == 2
    assert (replaced["model.lora.layers"]["was"], replaced["model.lora.layers"]["now"]) == ([30, 31], [1])
    verified = {entry["phase"] for entry in report["proved"]}
    assert verified == {"job", "model", "data", "template", "strategy", "steps", "checkpoint", "resume", "export"}
    assert (kept / "run" / "final" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "real").exists()
