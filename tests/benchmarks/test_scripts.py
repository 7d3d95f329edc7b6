"""Every script that README, docs and benchmarks/README.md name runs to its end in its smallest form."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SMALLEST = {
    "call_drawing.py": [],
    "code_metrics.py": [],
    "compare.py": ["--tiny", "--out", "{folder}"],
    "gpu.py": ["--tiny", "--device", "cpu", "--peak-tflops", "1", "--only", "1B full, ours", "--out", "{folder}"],
    "migration_table.py": ["{folder}"],
    "same_loss.py": ["--steps", "5", "--strategies", "fsdp2", "--out", "{folder}/loss.png"],
    "scaling.py": [],
}

ELSEWHERE = {
    "model_table.py": "test_model_table.py",
    "peer_defaults.py": "test_peer_defaults.py",
    "plan_published.py": "test_plan_published.py",
    "pretrained.py": "test_pretrained.py",
}
"""Scripts whose parts a test of their own runs, without their hours."""

NOT_HERE = {"hosts.py"}
"""It runs the tests of `tests/launch` as root."""


def named_scripts() -> set[str]:
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md"]
    return {name for text in texts for name in re.findall(r"(?<!:)(?<!tests/)benchmarks/(\w+\.py)", text)}


def test_every_named_script_exists_and_is_run_here_or_by_its_own_test():
    assert len(named_scripts()) >= 8
    assert named_scripts() <= SMALLEST.keys() | ELSEWHERE.keys() | NOT_HERE
    assert all((ROOT / "benchmarks" / name).is_file() for name in named_scripts())
    assert all((Path(__file__).parent / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_runs_to_its_end_in_its_smallest_form(tmp_path, name):
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "sft.yaml").write_text("model_name_or_path: gpt2\nlearning_rate: 1e-4\n")
    words = [word.format(folder=tmp_path) for word in SMALLEST[name]]
    command = [sys.executable, str(ROOT / "benchmarks" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip()
    if name == "compare.py":
        record = json.loads((tmp_path / "results.json").read_text())
        assert record["missing"] == []
        assert set(record["parts"]) == {"steps", "strategies"}
