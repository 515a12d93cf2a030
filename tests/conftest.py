from __future__ import annotations

import pytest
import torch

# The models are tiny: a second thread gains nothing, and costs a lot where others want the cores too.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
