from dataclasses import replace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from finetune.config.sections.report import ReportSection
from finetune.errors import MissingPackage, UserError
from finetune.registry.observers import TRACKERS, TrackerEntry
from finetune.report.events import Evaluated, RunEnded
from finetune.report.history import read_events
from finetune.report.trackers import TrackerReporter, check_trackers, tracker_options
from finetune.run.state.run_folder import build_reporter


class Notebook(GeneralTracker):
    """A tracker that remembers what it was told."""

    name = "notebook"
    requires_logging_directory = True
    opened: "list[Notebook]" = []  # noqa: RUF012  # shared on purpose: Accelerate makes the instances

    def __init__(self, run_name, logging_dir, **arguments):
        super().__init__()
        self.run_name, self.logging_dir, self.arguments = run_name, logging_dir, arguments
        self.config, self.logged, self.is_finished = None, [], False

    @property
    def tracker(self):
        return self

    def start(self):
        Notebook.opened.append(self)

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **_):
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


NOTEBOOK = ReportSection(trackers=("notebook",), project="stories", log_every_steps=1)


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "opened", [])
    return Notebook


def test_a_tracker_gets_config_steps_and_evaluations(notebook, tmp_path, started, take_step):
    section = ReportSection(trackers=("notebook",), project="stories", log_every_steps=2)
    reporter = TrackerReporter("notebook", section, run_folder=tmp_path / "run")
    assert notebook.opened == []  # nothing is started before the run is
    reporter(started)
    for step in (1, 2, 3):
        reporter(take_step(step))
    reporter(Evaluated(3, metrics={"loss": 0.5}, num_rows=4, seconds=0.1))
    reporter(RunEnded(3, reason="finished", seconds=9.0, metrics={}, final_folder=None))
    reporter.close()
    (opened,) = notebook.opened
    assert opened.run_name == "stories" and opened.logging_dir == str(tmp_path / "run" / "trackers")
    assert [step for step, _ in opened.logged] == [2, 3, 3]
    assert opened.logged[0][1]["train/loss"] == pytest.approx(2.31071)
    assert opened.logged[0][1]["train/tokens_per_second"] == pytest.approx(1234.0)
    assert opened.logged[0][1]["train/data_share"] == pytest.approx(0.01)
    assert opened.logged[1][1] == {"evaluation/loss": 0.5}
    assert opened.is_finished


def test_secrets_never_reach_a_tracker(notebook, tmp_path, started):
    reporter = TrackerReporter("notebook", NOTEBOOK, run_folder=tmp_path)
    reporter(started)
    assert "canary-secret" not in str(notebook.opened[0].config)
    assert notebook.opened[0].config["train.learning_rate"] == 1e-3


def test_trackers_fail_one_by_one_and_the_warning_names_which(notebook, tmp_path, monkeypatch, started, take_step):
    class Shy(Notebook):
        def start(self):
            raise PermissionError("not logged in")

    class Tired(Notebook):
        def log(self, values, step=None, **_):
            raise TimeoutError("no answer")

    for name, tracker in {"shy": Shy, "tired": Tired}.items():
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, tracker)
    section = ReportSection(trackers=("shy", "tired", "notebook"), log_every_steps=1, console="plain")
    reporter = build_reporter(section, run_folder=tmp_path, is_main=True)
    for event in (started, take_step(1), take_step(2)):
        reporter(event)
    reporter.close()
    tired, well = notebook.opened
    assert (type(tired), type(well)) == (Tired, Notebook) and tired.is_finished
    assert [step for step, _ in well.logged] == [1, 2]
    warnings = [event["message"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "Warned"]
    assert ["`shy`" in warnings[0], "not logged in" in warnings[0]] == [True, True]
    assert ["`tired`" in warnings[1], "no answer" in warnings[1]] == [True, True]
    assert len(warnings) == 2


class Service(Notebook):
    """A tracker whose service gives runs their ids, and knows some of them."""

    known: "list[str]" = []  # noqa: RUF012

    def start(self):
        self.id = self.arguments.get("run") or f"run{len(Service.known)}"
        if "run" in self.arguments and self.id not in Service.known:
            raise KeyError(self.id)
        super().start()
        Service.known.append(self.id)


@pytest.fixture
def service(notebook, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "service", Service)
    monkeypatch.setattr(Service, "known", [])
    entry = TrackerEntry(
        name="service",
        id_argument="run",
        id_attribute="id",
        resume_arguments={"resume": "allow"},
        config_is_fixed=True,
    )
    monkeypatch.setattr(TRACKERS, "_entries", {**TRACKERS._entries, "service": entry})
    return Service


def service_run(folder, started, *, step, project="stories"):
    warnings = []
    section = ReportSection(trackers=("service",), project=project)
    reporter = TrackerReporter("service", section, run_folder=folder, warn=lambda *warning: warnings.append(warning))
    reporter(replace(started, step=step))
    reporter.close()
    return Notebook.opened[-1], warnings


def test_a_resume_continues_the_run_of_the_tracker(service, tmp_path, started):
    first, _ = service_run(tmp_path, started, step=0)
    assert (first.id, first.arguments) == ("run0", {})
    resumed, warnings = service_run(tmp_path, started, step=3)
    assert (resumed.id, resumed.arguments, warnings) == ("run0", {"run": "run0", "resume": "allow"}, [])
    assert (first.config is None, resumed.config is None) == (False, True)


def test_a_run_that_starts_again_or_in_another_project_is_a_new_one(service, tmp_path, started):
    assert service_run(tmp_path, started, step=0)[0].id == "run0"
    assert service_run(tmp_path, started, step=0)[0].id == "run1"
    assert service_run(tmp_path, started, step=5, project="tales")[0].id == "run2"
    assert service_run(tmp_path, started, step=5, project="tales")[0].id == "run2"


def test_a_run_that_the_service_refuses_is_replaced_by_a_new_one_and_that_is_logged(service, tmp_path, started):
    service_run(tmp_path, started, step=0)
    service.known[:] = ["other"]
    new, ((step, message),) = service_run(tmp_path, started, step=3)
    assert (new.id, new.config is not None, step) == ("run1", True, 3)
    assert "`service`" in message
    assert "run0" in message
    assert service_run(tmp_path, started, step=4)[0].id == "run1"


@pytest.mark.parametrize("damage", ["", "[]", '{"service": 3}', '{"service": {"id": "run0"'])
def test_a_damaged_record_of_runs_means_a_new_run(service, tmp_path, started, damage):
    service_run(tmp_path, started, step=0)
    (tmp_path / "trackers.json").write_text(damage)
    assert service_run(tmp_path, started, step=3)[0].id == "run1"


def test_an_unknown_tracker_is_named_with_a_suggestion():
    with pytest.raises(UserError, match=r"report\.trackers: unknown tracker `wandbb`\. Did you mean `wandb`\?"):
        check_trackers(["wandbb"])


def test_a_tracker_whose_package_is_missing_names_the_extra():
    available = {str(tracker) for tracker in get_available_trackers()}
    missing = [name for name in ("tensorboard", "wandb", "mlflow", "trackio", "aim") if name not in available]
    if not missing:
        pytest.skip("every tracker is installed here")
    with pytest.raises(MissingPackage, match=r"finetune-accelerate\[tracking\]"):
        check_trackers(missing[:1])


def test_the_main_rank_writes_events_and_console(tmp_path, capsys, started, take_step):
    section = ReportSection(console="plain", log_every_steps=10)
    reporter = build_reporter(section, run_folder=tmp_path / "run", is_main=True)
    assert not (tmp_path / "run").exists()
    for event in (started, take_step(9), take_step(10)):
        reporter(event)
    reporter.close()
    assert [event["step"] for event in read_events(tmp_path / "run" / "events.jsonl")] == [0, 9, 10]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["10/120"]


def test_other_ranks_report_to_no_tracker_and_reject_the_same_names(tmp_path):
    reporter = build_reporter(ReportSection(), run_folder=tmp_path, is_main=False)
    assert reporter._reporters == []
    with pytest.raises(UserError, match="unknown tracker"):
        build_reporter(ReportSection(trackers=("papyrus",)), run_folder=tmp_path, is_main=False)


def test_each_tracker_gets_the_run_name_entity_group_and_tags_as_its_own_arguments(tmp_path):
    section = ReportSection(run_name="first", entity="team", group="ablation", tags=("lora", "8b"))
    folder = tmp_path / "run"
    assert {entry.name: tracker_options(entry.name, section, folder) for entry in TRACKERS} == {
        "aim": {},
        "clearml": {"task_name": "first", "tags": ["lora", "8b"]},
        "comet_ml": {"workspace": "team"},
        "dvclive": {},
        "mlflow": {"run_name": "first", "tags": {"lora": "true", "8b": "true"}},
        "swanlab": {"experiment_name": "first", "workspace": "team", "group": "ablation", "tags": ["lora", "8b"]},
        "tensorboard": {},
        "trackio": {"name": "first", "group": "ablation"},
        "wandb": {"dir": str(folder), "name": "first", "entity": "team", "group": "ablation", "tags": ["lora", "8b"]},
    }


def test_a_run_without_a_name_of_its_own_has_that_of_its_folder(tmp_path):
    assert tracker_options("wandb", ReportSection(), tmp_path / "run") == {"dir": str(tmp_path / "run"), "name": "run"}
