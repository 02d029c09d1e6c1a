"""Rules that hold for the files of the repository."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 300    # lines; the engine is to be read in an evening

listing = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
)
if listing.returncode:    # an archive without its history
    pytest.skip("not a git repository", allow_module_level=True)
FILES = [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
NOTEBOOKS = [path for path in FILES if path.suffix == ".ipynb"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_notebook_is_clean(path):
    """What tools/execute_notebooks.py writes: outputs with counts, and nothing of the machine or the moment."""
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, "widget state, or an editor's settings"
    assert "version" not in notebook["metadata"]["language_info"]
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))

    count = 0
    for cell in notebook["cells"]:
        assert "execution" not in cell["metadata"], f"time stamps in cell {cell['id']}"
        if cell["cell_type"] != "code" or not cell["source"]:
            continue
        count += 1
        assert cell["execution_count"] == count, f"cell {cell['id']} was not run in order: make notebooks"
        for output in cell["outputs"]:
            where = f"output of cell {cell['id']}"
            assert output["output_type"] != "error" or "raises-exception" in cell["metadata"].get("tags", ()), where
            assert output.get("name") != "stderr", where
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {}), where
            assert not re.search(r" at 0x[0-9a-f]{6,}", json.dumps(output)), f"a memory address in the {where}"


def test_no_file_knows_a_machine():
    """No home folders, and no address of a package registry: neither is the same for the next reader."""
    # Written in pieces, so that this file passes its own test.
    folders = "|".join(("/" + "work/", "/" + "root/", "/" + "home/[a-z]", "/" + "Users/[a-z]", "[A-Z]:" + r"\\Users"))
    hosts = "|".join(("pypi" + r"\.org", "python" + "hosted", "npmjs" + r"\.(org|com)", "deb" + r"\.debian"))
    forbidden = re.compile(f"{folders}|{hosts}")
    found = []
    for path in FILES:
        if path.suffix in {".woff2", ".png"} or "katex" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := forbidden.search(line):
                found.append(f"{relative(path)}:{number}: {match[0]}")
    assert found == []


def test_engine_files_are_short():
    code = [path for path in FILES if path.suffix == ".py" and relative(path).startswith(("cbref/", "kernels/"))]
    lengths = {relative(path): len(path.read_text().splitlines()) for path in code}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_folder_kernels_hides_no_library(tmp_path):
    """From the repository root, `kernels` is Hugging Face's library if it is installed, and ours is `cbref_kernels`."""
    library = tmp_path / "kernels"
    library.mkdir()
    (library / "__init__.py").write_text("whose = 'theirs'\n")
    program = "import kernels, cbref_kernels; print(kernels.whose, list(cbref_kernels.__path__)[0])"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["theirs", str(ROOT / "kernels")]


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"Version {version}." in (ROOT / "_config.yml").read_text()
    assert f'__version__ = "{version}"' in (ROOT / "cbref" / "__init__.py").read_text()
