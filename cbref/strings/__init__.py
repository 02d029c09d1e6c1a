"""Every word that a widget or a figure shows, by language: `strings/<language>/<group>.json`.

Code asks for a group and gets a flat dictionary; `{name}` placeholders are filled where the text is shown.
"""

import json
import os
from pathlib import Path

_ROOT = Path(__file__).parent
_ENGLISH = "en"  # the complete language: it defines which groups and which keys exist


def load(group: str, language: str | None = None) -> dict[str, str]:
    """Return the texts of `group` in `language` (default: the environment's `CBREF_LANG`, else English).

    A text that is not translated yet is English. An unknown group or language is a `ValueError`.
    """
    language = language or os.environ.get("CBREF_LANG") or _ENGLISH
    languages = sorted(folder.name for folder in _ROOT.iterdir() if any(folder.glob("*.json")))
    groups = sorted(file.stem for file in (_ROOT / _ENGLISH).glob("*.json"))
    if language not in languages:
        raise ValueError(f"no texts in language {language!r}; there are: {', '.join(languages)}")
    if group not in groups:
        raise ValueError(f"no group of texts {group!r}; there are: {', '.join(groups)}")
    files = [_ROOT / name / f"{group}.json" for name in (_ENGLISH, language)]
    return {key: text for file in files if file.exists() for key, text in json.loads(file.read_text("utf-8")).items()}
