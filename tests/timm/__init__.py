import pytest

pytest.importorskip(
    "timm", reason="timm is not installed; it needs torchvision, so CI has an environment of its own for it"
)
