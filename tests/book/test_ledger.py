"""The page of claims: all 55 are there, and each leads to a cell that shows something."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = json.loads((ROOT / "book" / "claims.json").read_text())
PAGE = (ROOT / "book" / "ledger.md").read_text()
FIELDS = {"id", "claim", "verdict", "correct", "chapter", "cell", "source"}
VERDICTS = ["right", "imprecise", "wrong", "depends"]


@cache
def cells(chapter: str) -> dict:
    notebook = json.loads((ROOT / "book" / f"{chapter}.ipynb").read_text())
    return {cell["id"]: cell for cell in notebook["cells"]}


def test_every_claim_is_there_once():
    assert [claim["id"] for claim in CLAIMS] == [f"C{i}" for i in range(1, 56)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["id"])
def test_claim_has_its_cell(claim):
    assert set(claim) == FIELDS
    assert claim["verdict"] in VERDICTS
    assert all(value.strip() for value in claim.values())
    cell = cells(claim["chapter"])[claim["cell"]]
    assert cell["cell_type"] == "code"
    assert cell["outputs"] or "assert" in "".join(cell["source"]), "a cell that shows nothing"


def test_page_is_what_the_data_say():
    run = subprocess.run([sys.executable, ROOT / "tools" / "ledger.py", "--check"], check=False)
    assert run.returncode == 0, "out of date: python tools/ledger.py"


def test_counts_are_right():
    counts = Counter(claim["verdict"] for claim in CLAIMS)
    rows = dict(re.findall(r"^\| (right|imprecise|wrong|depends) \| (\d+) \|", PAGE, re.MULTILINE))
    assert {verdict: int(number) for verdict, number in rows.items()} == {v: counts[v] for v in VERDICTS}
    assert sum(map(int, rows.values())) == len(CLAIMS)
    assert f"{len(CLAIMS)} claims" in " ".join(PAGE.split())


def test_links_lead_to_the_cells(book_html):
    """In the built page, each claim's link leads to the code cell itself."""
    page = (book_html / "book" / "ledger.html").read_text()
    for claim in CLAIMS:
        anchor = f"cell-{claim['cell']}"
        assert f'href="{claim["chapter"]}.html#{anchor}"' in page, claim["id"]
        chapter = (book_html / "book" / f"{claim['chapter']}.html").read_text()
        assert re.search(rf'id="{anchor}"', chapter), f"{claim['id']}: no {anchor} in {claim['chapter']}"
