"""A run exports what it has trained, or fails with exit code 1 and leaves no `final/`; the next export is verified."""

import json
import subprocess
import sys

import pytest

from finetune.commands.export import export
from finetune.config.load import load_config
from finetune.config.sections.export import ExportSection
from finetune.errors import ExportError
from finetune.export import save
from finetune.export.verify import program, verifier
from finetune.run.state.finished import is_exported
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.runtime.files.atomic import UMASK
from tests.scenarios.trained import forget, stay

QUICK = ["train.steps=4", "checkpoint.every_steps=4", "train.microbatch_size=2", "export.verify=true"]
LORA = "model.lora={rank: 4, alpha: 8.0}"


@pytest.fixture
def run(job, tmp_path, monkeypatch, capsys):
    """Return a function that runs the job in this process and returns what it said."""
    monkeypatch.setattr(distributed, "shut_down", stay)

    def start(*overrides):
        try:
            train_from_config(load_config(job, [f"run.folder={tmp_path / 'run'}", *QUICK, *overrides]))
        finally:
            forget()
        return capsys.readouterr().out

    return start


@pytest.fixture
def merge_without_adapter(monkeypatch):
    """Have every merge return the base: what the merge of a mixture of experts once did silently."""
    right = save.merging.merge

    def merge(model, weights, *, dtype):
        zeroed = {name: value * 0 if "lora_B" in name else value for name, value in weights.items()}
        return right(model, zeroed, dtype=dtype)

    monkeypatch.setattr(save.merging, "merge", merge)


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), (LORA,), (LORA, "export={merge: true, dtype: bfloat16, verify: true}")])
def test_a_run_logs_the_verification_of_its_export(run, tmp_path, overrides):
    said = run(*overrides)
    assert "verified in a fresh process in" in said and "logits of 4 rows within" in said
    record = json.loads((tmp_path / "run" / "final.json").read_text())
    assert record["export"]["verify"] is True


@pytest.mark.full
def test_an_export_that_fails_verification_is_set_aside_and_the_same_command_verifies_again(
    run, tmp_path, request, monkeypatch
):
    with monkeypatch.context():
        request.getfixturevalue("merge_without_adapter")
        with pytest.raises(ExportError, match="its logits differ from the trained model's") as raised:
            run(LORA, "export.merge=true")
        assert raised.value.exit_code == 1
    folder = tmp_path / "run"
    assert (folder / "final.failed" / "model.safetensors").is_file()
    assert not (folder / "final").exists() and not (folder / "final.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(distributed, "shut_down", stay)
    assert "verified in a fresh process" in run(LORA, "export.merge=true")
    assert (folder / "final").is_dir() and not (folder / "final.failed").exists()
    assert "nothing to do" in run(LORA, "export.merge=true")


@pytest.mark.full
def test_an_export_that_fails_verification_is_not_uploaded(trained, tmp_path, monkeypatch, merge_without_adapter):
    monkeypatch.setattr("finetune.commands.export.push_folder", pytest.fail)
    with pytest.raises(ExportError, match="logits differ"):
        export(trained("lora"), step=None, to=tmp_path / "out", dtype=None, merge=True, push_to_hub="me/x", verify=True)
    assert (tmp_path / "out.failed").is_dir() and not (tmp_path / "out").exists()


@pytest.mark.full
def test_exports_of_checkpoints_and_folders_are_verified_unless_disabled(trained, tmp_path, capsys):
    export(trained("lora"), step=2, to=tmp_path / "a", dtype=None, merge=True, push_to_hub=None, verify=True)
    export(trained("full") / "final", step=None, to=tmp_path / "b", dtype="float16", merge=False, push_to_hub=None)
    assert capsys.readouterr().out.count("verified in a fresh process in") == 2
    export(trained("lora"), step=2, to=tmp_path / "c", dtype=None, merge=False, push_to_hub=None, verify=False)
    assert "verified" not in capsys.readouterr().out


@pytest.mark.full
def test_an_export_interrupted_before_it_is_verified_leaves_no_folder_and_its_modes_follow_the_umask(
    trained, tmp_path, monkeypatch
):
    folder = tmp_path / "out"
    options = {"step": 2, "to": folder, "dtype": None, "merge": False, "push_to_hub": None, "verify": True}

    def interrupt(_, report, expected, *, final):
        assert report.folder == tmp_path / ".out.unverified" and not final.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(verifier.ExportVerifier, "check", interrupt)
        export(trained("full"), **options)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.unverified").mkdir()  # of a process that was killed
    export(trained("full"), **options)
    assert list(tmp_path.iterdir()) == [folder]
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {oct(0o666 & ~UMASK)}


def test_an_export_that_was_not_verified_is_made_again_where_that_is_wanted(tmp_path):
    def recorded(**keys):
        section = ExportSection().model_dump() | keys
        record = {"step": 4, "reason": "finished", "export": section, "files": {}}
        (tmp_path / "final.json").write_text(json.dumps(record))
        return [is_exported(tmp_path, step=4, section=ExportSection(verify=each)) for each in (True, False)]

    assert recorded(verify=True) == [True, True]
    assert recorded(verify=False) == [False, True]
    assert recorded(verify=True, dtype="bfloat16") == [False, False]
    (tmp_path / "final.json").write_text(
        json.dumps(
            {
                "step": 4,
                "reason": "finished",
                "files": {},
                "export": {key: value for key, value in ExportSection().model_dump().items() if key != "verify"},
            }
        )
    )
    assert is_exported(tmp_path, step=4, section=ExportSection())  # older versions recorded no such key


@pytest.mark.full
def test_the_process_is_a_fresh_one_that_knows_nothing_of_this_package(tmp_path):
    words = [sys.executable, "-P", program.__file__, "AutoModelForCausalLM", "peft"]
    code = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    code += "assert not [name for name in sys.modules if name.split('.')[0] == 'finetune']"
    subprocess.run([sys.executable, "-P", "-c", code, *words[2:]], input=b"\n", check=True, timeout=120)
