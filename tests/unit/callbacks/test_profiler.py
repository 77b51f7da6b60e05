from __future__ import annotations

import pytest
import torch

from framework.callbacks.profiler import TorchProfiler
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.run_dir import RunDir
from framework.topology import Topology

CONTEXT = Context(Topology(1, 1, 0, 1), 0, 0, 0, (torch.device("cpu"),), "gloo")
WRONG = [{"wait": -1}, {"warmup": -1}, {"active": 0}]


@pytest.mark.parametrize("keywords", WRONG, ids=str)
def test_numbers_of_steps_that_make_no_sense_are_refused(tmp_path, keywords):
    with pytest.raises(ConfigError, match="numbers of steps"):
        TorchProfiler(context=CONTEXT, run_dir=RunDir(tmp_path), **keywords)
