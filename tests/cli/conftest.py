from tests.training.conftest import _one_thread, tiny

__all__ = ["_one_thread", "tiny"]
