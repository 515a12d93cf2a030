import pytest
import torch

from tests.training.tiny import tiny

__all__ = ["tiny"]


@pytest.fixture(autouse=True)
def _one_thread():
    # Threads cost these models more than they bring, and on busy cores they wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
