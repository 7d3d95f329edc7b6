"""On each kind of GPU, a run chooses what the file in `choices/` says: `python -m tests.fake_gpu.choices` renews it."""

import pytest

from tests.fake_gpu.choices import FOLDER, table, write_job_of
from tests.fake_gpu.machine import MACHINES
from tests.fake_gpu.walk import CPU_BUILD

pytestmark = CPU_BUILD
FAST = ("H100", "T4")


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each in FAST else pytest.mark.full) for each in MACHINES]
)
def test_the_choices_of_a_run_are_those_in_the_file_of_its_gpu(tmp_path, kind):
    assert table(kind, write_job_of(kind, tmp_path / kind), tmp_path) == (FOLDER / f"{kind}.txt").read_text()


def test_every_file_of_choices_is_of_a_gpu():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(MACHINES)
