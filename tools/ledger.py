"""Write book/ledger.md, the page of the document's claims and their verdicts, from book/claims.json.

    python tools/ledger.py            write the page
    python tools/ledger.py --check    say whether the page is up to date, and change nothing
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

BOOK = Path(__file__).resolve().parent.parent / "book"
VERDICTS = ("right", "imprecise", "wrong", "depends")
# The document's own sections, and the last claim of each.
SECTIONS = {
    "Opening": 5,
    "Static batching": 10,
    "Iteration-level scheduling": 18,
    "Prefill and decode": 23,
    "Chunked prefill": 35,
    "The simulation": 40,
    "Summary and open questions": 45,
    "Quizzes": 52,
    "References": 55,
}
INTRODUCTION = """\
# Ledger of claims

The course follows a textbook section on continuous batching, which is a good outline and not a reliable source. It
makes {total} claims. This page lists them all, in our words, with a verdict, what is right, and a link to the cell that
shows it. (In JupyterLab and on GitHub the link opens the notebook; look for the cell.)

| verdict | claims | which |
|---|---:|---|
{table}

*Right* means right as it stands, or with a small limit that is named. *Imprecise* means that something is missing or
stretched. *Wrong* means wrong. *Depends* means that it holds in some settings and not in others, or shows nothing
either way.
"""


def number(claim: dict) -> int:
    return int(claim["id"][1:])


def title(chapter: str) -> str:
    """The heading of a chapter's notebook."""
    for cell in json.loads((BOOK / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if found := re.match(r"# (.+)", "".join(cell["source"])):
            return found[1]
    raise ValueError(f"book/{chapter}.ipynb has no heading")


def linked(source: str) -> str:
    """Bare addresses become links that GitHub and MyST both understand."""
    return re.sub(r"(?<![(<])https://[^\s,;)]*[^\s,;).]", r"<\g<0>>", source)


def sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?", ")", "”", '"')) else text + "."


def entry(claim: dict) -> str:
    cell = f"{claim['chapter']}.ipynb#cell-{claim['cell']}"
    return (
        f"### {claim['id']}\n\n"
        f"**{claim['verdict'].capitalize()}.** It says: {sentence(claim['claim'])}\n\n"
        f"{sentence(claim['correct'])}\n\n"
        f"[Cell in “{title(claim['chapter'])}”]({cell}). Source: {sentence(linked(claim['source']))}\n"
    )


def render(claims: list[dict]) -> str:
    claims = sorted(claims, key=number)
    counts = Counter(claim["verdict"] for claim in claims)
    rows = []
    for verdict in VERDICTS:
        which = ", ".join(f"[{c['id']}](#{c['id'].lower()})" for c in claims if c["verdict"] == verdict)
        rows.append(f"| {verdict} | {counts[verdict]} | {which} |")
    parts = [INTRODUCTION.format(total=len(claims), table="\n".join(rows))]
    first = 1
    for section, last in SECTIONS.items():
        parts.append(f"## {section}\n")
        parts += [entry(claim) for claim in claims if first <= number(claim) <= last]
        first = last + 1
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    check = parser.parse_args().check
    text = render(json.loads((BOOK / "claims.json").read_text(encoding="utf-8")))
    page = BOOK / "ledger.md"
    if check:
        return int(not page.exists() or page.read_text(encoding="utf-8") != text)
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
