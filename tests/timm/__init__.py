import pytest

pytest.importorskip(
    "timm",
    reason="timm is not installed: it needs torchvision, so these tests have an environment of their own (.ci/run)",
)
