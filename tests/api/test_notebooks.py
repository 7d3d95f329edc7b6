"""The notebooks of docs/notebooks run from their first cell to their last in a fresh kernel."""

from pathlib import Path

import pytest

from tests import launching

NOTEBOOKS = launching.ROOT / "docs" / "notebooks"


@pytest.mark.full
@pytest.mark.parametrize("name", ["sft_lora.ipynb", "custom_loss.ipynb"])
def test_every_cell_of_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(launching.ROOT))
    for variable, value in launching.SETTINGS.items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("finished" in str(output.get("data", output.get("text", ""))) for output in outputs)


def test_the_notebooks_are_saved_without_outputs():
    names = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert names == ["custom_loss.ipynb", "sft_lora.ipynb"]
    for name in names:
        text = (NOTEBOOKS / name).read_text(encoding="utf-8")
        assert '"outputs": []' in text and '"output_type"' not in text
