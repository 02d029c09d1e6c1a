"""What the pages say that is also written elsewhere: hardware, references, the map of chapters, the edition."""

import json
import re
from pathlib import Path

import pytest
import yaml
from pybtex.database import parse_file

from cbref.hardware import HARDWARE

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
NOTEBOOKS = sorted(BOOK.glob("*.ipynb"))
PAGES = [*NOTEBOOKS, *sorted(BOOK.glob("*.md"))]
TOC = [c["file"] for part in yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"] for c in part["chapters"]]


def prose(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_hardware_table_is_the_engines():
    text = (BOOK / "hardware.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", text, re.M)
    page = {name: tuple(map(float, row)) for name, *row in rows}
    assert page == {
        name: (gpu.flops / 1e12, gpu.bandwidth / 1e12, gpu.memory / 1e9, round(gpu.ridge))
        for name, gpu in HARDWARE.items()
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_paper_is_in_the_references(path):
    entries = parse_file(str(BOOK / "references.bib")).entries.values()
    known = {entry.fields["url"] for entry in entries}
    known |= {url for entry in entries for url in re.findall(r"\\url\{([^}]+)\}", entry.fields.get("note", ""))}
    linked = set(re.findall(r"https://(?:www\.)?(?:arxiv\.org|usenix\.org|doi\.org)/[\w./-]*\w", prose(path)))
    assert linked - known == set(), "add these to book/references.bib"


def test_references_say_where_they_are():
    for key, entry in parse_file(str(BOOK / "references.bib")).entries.items():
        assert entry.fields["url"].startswith("https://"), key
        assert "2203.10842" not in str(entry), "that is not Orca"
        assert re.search(r"\d{4}$", entry.fields["year"]) and entry.persons["author"], key


def test_welcome_maps_every_chapter():
    """In the order of the book, with its time."""
    row = r"^\| (\d+)\. \[([^]]+)\]\((\w+)\.ipynb\) \|.*\| (\d+)(?: \+ \d+)? \|$"
    rows = re.findall(row, prose(BOOK / "welcome.ipynb"), re.M)
    assert [f"book/{file}" for _, _, file, _ in rows] == [name for name in TOC if (ROOT / f"{name}.ipynb").exists()]
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for _, title, file, minutes in rows:
        head = prose(BOOK / f"{file}.ipynb")
        assert head.startswith(f"# {title}"), file
        assert f"{minutes} minutes" in " ".join(re.sub(r"^> ?", "", head[:1500], flags=re.M).split()), file


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_plain_markdown(path):
    """It has to read well in JupyterLab, on GitHub and on Colab, which know none of MyST's directives."""
    assert re.findall(r"^(?:```\{|:{3,}).*|\{[a-z:]+\}`[^`]+`", prose(path), re.M) == []


def test_one_edition_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    day, month, year = re.search(r"Edition of (\d+) (\w+) (\d{4})", (ROOT / "_config.yml").read_text()).groups()
    assert f"Edition of {day} {month} {year}, version {citation['version']}" in (BOOK / "teaching.md").read_text()
    assert citation["date-released"] == f"{year}-11-{int(day):02d}" and month == "November"
    assert f"Version {citation['version']}." in (ROOT / "_config.yml").read_text()
