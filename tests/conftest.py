"""What every test file shares: the import path, where the reference data is, and how many threads torch takes."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is a reference here, never a reason to use the network

import torch  # noqa: E402

# In this process alone: OMP_NUM_THREADS would reach the tests' own subprocesses, which share out the cores themselves.
torch.set_num_threads(min(2, os.cpu_count() or 1))  # more threads only slow the tiny shapes of the tests down


@pytest.fixture
def one_thread():
    """Products of tiny models gain nothing from a second thread, and lose much where another process wants the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material (data/, qwen3/, grader/), which is not part of the repository."""
    folder = Path(os.environ.get("RLOO_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set RLOO_SHARED to the folder that holds data/ and qwen3/")
    return folder
