"""Run notebooks and store their outputs, so that a second run writes the same bytes.

    python tools/execute_notebooks.py                      every chapter, in the order of _toc.yml
    python tools/execute_notebooks.py book/convoy.ipynb    only this one

Stored are outputs and their execution counts. Left out is what differs between runs or machines (time stamps, the minor
version of Python) and what is of no use without a kernel (widget state and live widget views).
"""

import argparse
import os
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LIVE_WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


def chapters() -> list[Path]:
    """The notebooks of the book, in reading order."""

    def walk(entry):
        yield from (ROOT / f"{entry[key]}.ipynb" for key in ("root", "file") if key in entry)
        for key in ("parts", "chapters", "sections"):
            for child in entry.get(key, ()):
                yield from walk(child)

    return [path for path in walk(yaml.safe_load((ROOT / "_toc.yml").read_text())) if path.exists()]


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Drop, in place, what a second run would write differently."""
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.metadata.pop("ExecuteTime", None)
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            output.get("data", {}).pop(LIVE_WIDGET, None)
        # An output that was nothing but a live view would be an empty box on the page.
        cell.outputs = [output for output in cell.outputs if output.get("data", True)]


def execute(path: Path, progress: tqdm) -> None:
    """Run one notebook in its own folder, as JupyterLab does, and write it back."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=300,
        record_timing=False,
        coalesce_streams=True,    # else the split into pieces depends on timing
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],    # a kernel warns of its plain sockets, which are fine on one machine
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_executed=lambda **_: progress.update(),
    )
    progress.set_description(path.stem)
    client.execute()
    normalise(notebook)
    nbformat.write(notebook, path)


def main() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # in the notebooks: a bar shows on slow machines only
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every notebook of _toc.yml")
    paths = parser.parse_args().notebooks or chapters()
    cells = sum(
        cell.cell_type == "code" and bool(cell.source.strip())
        for path in paths
        for cell in nbformat.read(path, as_version=4).cells
    )
    with tqdm(total=cells, unit="cell") as progress:
        for path in paths:
            execute(path, progress)


if __name__ == "__main__":
    main()
