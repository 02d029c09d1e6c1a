import os

# Before torch is imported: where others use the cores too, threads that spin while they wait cost minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from engine_support import executor_of, threads, tiny_model  # noqa: F401 (threads: for every test here)

from cbref.executors.model import ModelExecutor


@pytest.fixture(scope="session")
def smollm_executor(smollm):
    """One cache for all engines, one after the other: each finds what the one before has left there."""
    return ModelExecutor(*smollm, num_blocks=128, block_size=16)


@pytest.fixture(scope="session")
def tiny():
    return tiny_model()


@pytest.fixture(scope="session")
def tiny_executor(tiny):
    return executor_of(tiny)
