"""cbref: a language model served by continuous batching, in code that is meant to be read.

from cbref import Engine, SamplingParams
engine = Engine.from_pretrained("smollm2-135m", policy="orca", max_batch_size=4)
for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

from importlib import import_module

from cbref.engine import Engine
from cbref.request import Chunk, Completion, Request, SamplingParams, Status, TokenEvent
from cbref.schedulers import Scheduler

__version__ = "0.1.0"
_LAZY = {"load_model": "cbref.models", "calibrate": "cbref.calibration"}  # torch is for those who want a model
__all__ = ["Chunk", "Completion", "Engine", "Request", "SamplingParams", "Scheduler", "Status", "TokenEvent", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cbref' has no attribute {name!r}")
