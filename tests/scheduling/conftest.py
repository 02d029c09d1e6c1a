import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # engine_support: small models and fakes

from engine_support import threads, tiny_model  # noqa: F401 (threads: for every test here)

from cbref.executors.model import ModelExecutor


@pytest.fixture(scope="session")
def tiny():
    return tiny_model()


@pytest.fixture(scope="session")
def smollm_executor(smollm):
    return ModelExecutor(*smollm, num_blocks=64, block_size=16)
