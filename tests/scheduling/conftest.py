import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # engine_support: small models and fakes

from engine_support import tiny_model

from cbref.executors.model import ModelExecutor


@pytest.fixture(scope="session")
def tiny():
    return tiny_model()


@pytest.fixture(scope="session")
def smollm_executor(smollm):
    return ModelExecutor(*smollm, num_blocks=64, block_size=16)


@pytest.fixture(autouse=True)
def threads(request):
    """Small models run on one thread: two would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if "smollm" in request.fixturenames else 1)
    yield
    torch.set_num_threads(before)
