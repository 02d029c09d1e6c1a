"""What the benchmarks share: where a result goes, and what it says about the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

AZURE_TRACE = {
    "cite": "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024",
    "published": 2024,
    "url": "https://github.com/Azure/AzurePublicDataset",
    "licence": "CC BY 4.0",
}


def header(*packages: str) -> dict:
    """When, on what, and with which versions a result was made."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("cbref", *packages)}},
    }


def write(result: dict, out: Path | None) -> None:
    """As JSON to ``out``, or to the screen."""
    text = json.dumps(result, indent=2)
    if out is None:
        print(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n", encoding="utf-8")
