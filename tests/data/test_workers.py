"""What `auto` comes to is a matter of the machine; what is written stays as it is written."""

import pytest

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.loader import (
    LoaderSettings,
    MachineResources,
    format_loader_settings,
    loader_settings,
    num_prepare_workers,
)

LAPTOP = MachineResources(num_cores=2, local_world=1, has_device=False)
SERVER = MachineResources(num_cores=64, local_world=8, has_device=True)
SHARED = MachineResources(num_cores=16, local_world=8, has_device=True)
AUTO = {"num_workers": "auto", "pin_memory": "auto", "persistent_workers": "auto", "prefetch_factor": "auto"}


def section(**keys):
    return DataSection(train=TrainingSourceSection(path="rows.jsonl"), max_length=64, **keys)


def test_token_loading_defaults_to_no_workers_on_a_cpu_and_two_with_a_gpu():
    assert loader_settings(section(), resources=LAPTOP) == LoaderSettings(0, False, False, None)
    assert loader_settings(section(), resources=SERVER) == LoaderSettings(2, True, False, None)
    assert loader_settings(section(), resources=SERVER, cost="heavy").num_workers == 7


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (LAPTOP, LoaderSettings(0, False, False, None)),  # tokens are read faster than they are handed over
        (SERVER, LoaderSettings(2, True, True, 2)),
        (SHARED, LoaderSettings(1, True, True, 2)),  # two cores per rank: one trains, one loads
        (MachineResources(num_cores=4, local_world=8, has_device=True), LoaderSettings(0, True, False, None)),
    ],
)
def test_auto_is_decided_by_cores_ranks_and_devices(room, expected):
    assert loader_settings(section(**AUTO), resources=room) == expected


def test_data_that_must_be_decoded_gets_more_workers():
    assert loader_settings(section(**AUTO), resources=SERVER, cost="heavy") == LoaderSettings(7, True, True, 4)
    assert loader_settings(section(**AUTO), resources=LAPTOP, cost="heavy").num_workers == 1


def test_written_loader_settings_are_used():
    written = section(num_workers=5, pin_memory=False, persistent_workers=False, prefetch_factor=7)
    for room in (LAPTOP, SERVER):
        assert loader_settings(written, resources=room) == LoaderSettings(5, False, False, 7)


def test_every_loader_setting_is_logged_with_the_machine():
    wished = section(num_workers="auto", prefetch_factor=4, persistent_workers=True)
    settings = loader_settings(wished, resources=LAPTOP)
    assert settings == LoaderSettings(0, False, False, None)
    assert format_loader_settings(wished, settings, resources=LAPTOP) == (
        "loading: num_workers: 0, pin_memory: false, persistent_workers: false, prefetch_factor: null "
        "(cores: 2, ranks: 1, no GPU)"
    )
    written = section(num_workers=2, pin_memory=False)
    assert format_loader_settings(written, loader_settings(written, resources=SERVER), resources=SERVER) is None


def test_prepare_workers_default_to_all_cores_of_the_machine():
    assert num_prepare_workers(section(prepare_workers="auto"), resources=SERVER) == 63
    assert num_prepare_workers(section(prepare_workers="auto"), resources=LAPTOP) == 0
    assert num_prepare_workers(section(prepare_workers=3), resources=LAPTOP) == 3


def test_the_defaults_are_automatic_and_leave_each_of_several_ranks_a_core_to_train_with():
    default = section()
    assert (default.num_workers, default.pin_memory) == ("auto", "auto")
    for local_world in (1, 2, 4, 8, 16):
        room = MachineResources(num_cores=16, local_world=local_world, has_device=True)
        settings = loader_settings(default, resources=room)
        assert settings.pin_memory
        assert local_world * (settings.num_workers + 1) <= max(16, local_world)
