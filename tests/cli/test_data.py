"""The commands about data are one call each, with the words as they were typed."""

import pytest


def test_a_preview_is_asked_for(typed, calls, job):
    assert typed("preview", "--config", job, "--rows", 3, "--from", 40)[0] == 0
    named = {"num_rows": 3, "start": 40}
    assert calls.made == [("finetune.commands.preview.preview:preview", (job, []), named)]


@pytest.mark.parametrize("words", [("--rows", 0), ("--from", -1)])
def test_a_preview_of_nothing_is_refused(typed, calls, job, words):
    assert typed("preview", "--config", job, *words)[0] == 2
    assert calls.made == []


def test_a_file_is_previewed_without_a_job(typed, calls):
    assert typed("preview", "s3://bucket/rows.csv", "--rows", 3, "--tokenizer", "gpt2")[0] == 0
    named = {"num_rows": 3, "tokenizer": "gpt2"}
    assert calls.made == [("finetune.commands.preview.file:preview_file", ("s3://bucket/rows.csv",), named)]


@pytest.mark.parametrize("words", [(), ("rows.csv", "--from", 3), ("rows.csv", "--set", "a=1")])
def test_a_preview_is_of_a_job_or_of_a_file(typed, calls, words):
    code, _, error = typed("preview", *words)
    assert (code, calls.made) == (2, [])
    assert "preview: " in error


def test_a_job_names_its_tokenizer(typed, calls, job):
    assert typed("preview", "--config", job, "--tokenizer", "gpt2")[0] == 2
    assert typed("preview", "rows.csv", "--config", job)[0] == 2
    assert calls.made == []


def test_a_machine_is_examined_with_or_without_a_job(typed, calls, job):
    calls.answer = 0
    assert typed("doctor")[0] == 0
    assert typed("doctor", "--config", job, "--json", "--wait", 5)[0] == 0
    place, usual = "finetune.commands.doctor.doctor:examine", {"as_json": False, "wait_seconds": 60.0}
    assert calls.made == [
        (place, (None, []), usual),
        (place, (job, []), {**usual, "as_json": True, "wait_seconds": 5.0}),
    ]


def test_a_machine_to_fix_is_an_exit_code(typed, calls):
    calls.answer = 1
    assert typed("doctor")[0] == 1


def test_doctor_rejects_a_loader_measurement_as_json(typed, calls, job):
    code, _, complaint = typed("doctor", "--data", "--json", "--config", job)
    assert (code, calls.made) == (2, [])
    assert "Leave" in complaint


def test_a_loader_is_measured_of_a_job(typed, calls, job):
    assert typed("doctor", "--data", "--config", job, "--seconds", 0.5)[0] == 0
    assert calls.made == [("finetune.commands.doctor.loader_speed:examine_loader", (job, []), {"seconds": 0.5})]


def test_a_loader_without_a_job_is_a_mistake(typed, calls):
    code, _, complaint = typed("doctor", "--data")
    assert (code, calls.made) == (2, [])
    assert complaint.startswith("error: --data: add --config JOB.yaml")
