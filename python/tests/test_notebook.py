"""The notebook of the examples, in a kernel of Jupyter."""

import pathlib
import sys

import nbformat
import pytest
from conftest import DEADLINE, ROOT
from nbclient import NotebookClient

FOLDER = ROOT / "examples/pytorch"


@pytest.fixture
def kernels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are of this interpreter, and write nothing to the user's folders."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    folder = tmp_path / "JUPYTER_DATA_DIR" / "kernels" / "python3"
    folder.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (folder / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "Python 3", "language": "python"}}')
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_notebook_runs_and_its_table_shows_the_end_of_the_job(kernels: None) -> None:
    notebook = nbformat.read(FOLDER / "circle.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "outputs are not committed"
    client = NotebookClient(
        notebook,
        timeout=DEADLINE,
        iopub_timeout=DEADLINE,
        startup_timeout=DEADLINE,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    # The table took the place of progress on standard error, and was replaced until the end.
    assert [output.output_type for output in outputs["run"]] == ["display_data"], outputs["run"]
    table = outputs["run"][0].data["text/html"]
    assert "<td>Succeeded</td>" in table and "<th>accuracy</th>" in table, table

    (logs,) = outputs["logs"]
    assert "'accuracy': 0.9" in logs.text and "trainer 1 of 2: accuracy 0.9" in logs.text, logs.text
    assert outputs["centre"][0].data["text/plain"] == "[1, 1, 0]"
    failure = "".join(output.text for output in outputs["failure"] if output.output_type == "stream")
    assert "the data is not there" in failure, failure
