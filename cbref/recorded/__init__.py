"""Small tables of what others measured on GPUs, and of what the kernels compile to, for figures without a GPU.

Each JSON file says what it is, its source, licence and machine, and what was left out. They are made from larger files
by ``tests/book/test_recorded.py``, which also compares, or by the script of the same name in ``benchmarks/``.
"""

import json
from pathlib import Path

_FOLDER = Path(__file__).parent


def load(name: str) -> dict:
    """The table ``name`` as a dictionary. ``ValueError`` for a name that is not there."""
    names = sorted(file.stem for file in _FOLDER.glob("*.json"))
    if name not in names:
        raise ValueError(f"no recorded table {name!r}; there are: {', '.join(names)}")
    return json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
