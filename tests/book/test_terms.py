"""One word for one thing: the glossary, and the spellings that the prose may not use."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
RULES = json.loads((BOOK / "terms.json").read_text())
GLOSSARY = (BOOK / "glossary.md").read_text()
ENTRIES = re.findall(r"^(\S[^\n]*)\n: ([^\n]+)$", GLOSSARY, re.MULTILINE)
PAGES = sorted([*BOOK.glob("*.ipynb"), *BOOK.glob("*.md")])

# What must not be written -> what is written instead. Upper and lower case count.
INSTEAD = {variant: entry["term"] for entry in RULES["terms"] for variant in entry["instead_of"]}
for group in ("names", "spelling"):
    INSTEAD |= {variant: right for right, variants in RULES[group].items() for variant in variants}


def prose(path: Path) -> str:
    """Without code, formulas, addresses, and quotations (titles of papers spell as they like)."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    patterns = (
        (r"^```.*?^```", re.DOTALL | re.MULTILINE),
        (r"`[^`]*`", 0),
        (r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL),
        (r"\]\([^)]*\)", 0),
        (r"<https?://[^>]*>|https?://\S+", 0),
        (r'"[^"]{1,200}"|“[^”]{1,200}”', 0),
    )
    for pattern, flags in patterns:
        text = re.sub(pattern, " ", text, flags=flags)
    return " ".join(text.split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_prose_uses_the_words_of_the_glossary(path):
    text = prose(path)
    if path.name == "glossary.md":    # an entry may say what else its term is called
        tbt = next(text for term, text in ENTRIES if term == "TBT")
        text = text.replace(" ".join(tbt.split("[")[0].split()), " ")
    found = {
        variant: right
        for variant, right in INSTEAD.items()
        if re.search(rf"(?<![\w-]){re.escape(variant)}(?![\w-])", text)
    }
    assert found == {}, "left: what is written; right: what the glossary has"


def test_glossary_is_in_order_and_complete():
    terms = [term for term, _ in ENTRIES]
    assert terms == sorted(terms, key=str.lower)
    assert sorted(terms) == sorted(entry["term"] for entry in RULES["terms"])
    assert len(terms) == len(set(terms)) == GLOSSARY.count("\n: ")


@pytest.mark.parametrize("entry", RULES["terms"], ids=lambda entry: entry["term"])
def test_entry_is_one_sentence_and_names_its_chapter(entry):
    text = dict(ENTRIES)[entry["term"]]
    definition, _, link = text.rpartition(" [")
    assert link.endswith(f"]({entry['chapter']}.ipynb)")
    assert definition.endswith(".") and not re.search(r"[.!?] [A-Z]", definition), "one sentence"
    assert (BOOK / f"{entry['chapter']}.ipynb").exists()
    notebook = json.loads((BOOK / f"{entry['chapter']}.ipynb").read_text())
    words = " ".join("".join(cell["source"]) for cell in notebook["cells"]).lower()
    assert re.sub(r"s$", "", entry["term"].lower().split()[0].split("-")[0]) in words, "its chapter never mentions it"
