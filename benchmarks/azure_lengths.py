"""How much memory and how many slot-iterations are wasted on the lengths of the Azure traces: on every row of them.

    python benchmarks/azure_lengths.py FOLDER --out cbref/recorded/azure_lengths.json

Data (not part of this project): the two CSV files of the Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA
2024; CC BY 4.0), https://github.com/Azure/AzurePublicDataset. The result goes with the package, since chapters print
from it. It has no date and no machine: it follows from the traces alone, and tests/book/test_azure_lengths.py compares.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
from report import AZURE_TRACE, write
from tqdm import tqdm

from cbref.workloads import read_azure_csv

LIMIT = 16_384  # tokens that a service takes; the least power of two that holds the longest request
PAGE = 16  # tokens in a block, where nothing else is said
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 4, 8, 16, 32, 64)
MEMORY = 65_536  # tokens, where pieces of exact size are handed out
PERCENT = (5, 50, 95)


def lengths(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in prompt and answer [requests], in the order of arrival."""
    work = read_azure_csv(path)
    return np.array([len(p) for p in work.prompts]), np.array([p.max_tokens for p in work.params])


def summary(tokens: np.ndarray) -> dict:
    percentiles = {f"p{p}": round(float(v)) for p, v in zip(PERCENT, np.percentile(tokens, PERCENT), strict=True)}
    return {"mean": round(float(tokens.mean()), 1), "min": int(tokens.min()), **percentiles, "max": int(tokens.max())}


def stored_tokens(prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """What each request has stored after each of its steps, one after the other; the last token is never stored."""
    step = np.arange(answers.sum()) - np.repeat(np.cumsum(answers) - answers, answers)
    return np.repeat(prompts, answers) + step


def live_share(prompts: np.ndarray, answers: np.ndarray, stored: np.ndarray) -> dict[str, float]:
    """Share of the memory that is held, summed over all steps, that holds a token."""
    power = 2 ** np.ceil(np.log2(prompts + answers - 1)).astype(int)
    held = {"max": LIMIT * answers.sum(), "pow2": (power * answers).sum(), "paged": PAGE * (-(-stored // PAGE)).sum()}
    return {scheme: round(float(stored.sum() / places), 6) for scheme, places in held.items()}


def block_sizes(stored: np.ndarray) -> list[dict]:
    """Internal waste, and the length of a request's block table, averaged over all steps."""
    entries = {size: -(-stored // size) for size in BLOCKS}
    return [
        {
            "size": size,
            "wasted": round(float(1 - stored.sum() / (size * n.sum())), 5),
            "entries": round(float(n.mean()), 1),
        }
        for size, n in entries.items()
    ]


def external(prompts: np.ndarray, answers: np.ndarray, name: str) -> dict:
    """External waste: pieces of the exact size (in blocks), each in the first hole that is large enough for it.

    When none is, somebody at random ends and leaves, until one is. Counted are newcomers for whom enough was free.
    """
    rng = np.random.default_rng(0)
    held: list[tuple[int, int]] = []  # (start, stop), sorted
    stuck = []
    for need in tqdm((-(-(prompts + answers - 1) // PAGE) * PAGE).tolist(), unit="req", desc=f"holes {name}"):
        refused = False
        while True:
            edges = [0, *(edge for piece in held for edge in piece), MEMORY]
            holes = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
            if (place := next((a for a, b in holes if b - a >= need), None)) is not None:
                break
            free = sum(b - a for a, b in holes)
            if free >= need and not refused:
                stuck.append(free)
                refused = True
            held.pop(rng.integers(len(held)))
        held = sorted([*held, (place, place + need)])
        assert all(a[1] <= b[0] for a, b in pairwise(held))
    return {"memory": MEMORY, "stuck": round(len(stuck) / len(prompts), 4), "free": round(np.mean(stuck) / MEMORY, 4)}


def useful(answers: np.ndarray, batch_size: int) -> float:
    """Share of the slot-iterations of full static batches that yield a token."""
    batches = answers[: len(answers) // batch_size * batch_size].reshape(-1, batch_size)
    return round(float(batches.mean() / batches.max(axis=1).mean()), 4)


def measure(folder: Path) -> dict:
    result = {
        "what": "lengths in the Azure LLM inference trace 2023, and the memory and slot-iterations wasted on them",
        "machine": "computed from all rows of the traces; nothing was served",
        **AZURE_TRACE,
        "left_out": "the rows themselves: what is here are means, percentiles and shares",
        "traces": {},
    }
    for kind in ("conv", "code"):
        prompts, answers = lengths(folder / f"AzureLLMInferenceTrace_{kind}.csv")
        stored = stored_tokens(prompts, answers)
        shuffled = np.random.default_rng(0).permutation(answers)
        result["traces"][kind] = {
            "requests": len(prompts),
            "prompt": summary(prompts),
            "answer": summary(answers),
            "request": summary(prompts + answers),
            "correlation": round(float(np.corrcoef(prompts, answers)[0, 1]), 2),
            "stored": round(float(stored.mean())),  # tokens of a request, averaged over all steps
            "live_share": live_share(prompts, answers, stored),
            "live_share_shuffled": live_share(prompts, shuffled, stored_tokens(prompts, shuffled)),
            "blocks": block_sizes(stored),
            "external": external(prompts, answers, kind),
            "batches": [
                {"size": n, "useful": useful(answers, n), "useful_shuffled": useful(shuffled, n)} for n in BATCHES
            ],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the two CSV files lie")
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()
    write(measure(args.folder), args.out)


if __name__ == "__main__":
    main()
