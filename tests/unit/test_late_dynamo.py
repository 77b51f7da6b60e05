"""In processes of their own: what is imported can't be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import run_framework, run_python

STEPS = """
import sys
import torch
from torch import nn
from tests.helpers.internals import import_dynamo_late

REAL = "torch._dynamo.convert_frame"  # a part of it that nothing else imports

def trained():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
        schedule.step()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return torch.cat([p.detach().flatten() for p in model.parameters()])

def wrapped():
    from torch import distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(5, 3)).sum().backward()
    dist.destroy_process_group()
"""

NOT_IMPORTED = f"""{STEPS}
import_dynamo_late()
late = trained()
wrapped()
assert REAL not in sys.modules
from torch._dynamo.utils import counters
assert REAL in sys.modules
assert counters is torch._dynamo.utils.counters is sys.modules["torch._dynamo.utils"].counters
assert torch.equal(trained(), late)
"""

IMPORTED = f"""{STEPS}
import_dynamo_late()
trained()
assert REAL not in sys.modules
model = nn.Linear(3, 2)
model.compile(backend="eager")
model(torch.ones(5, 3)).sum().backward()
assert REAL in sys.modules
assert "__dynamo_disable" not in vars(torch.optim.Optimizer.zero_grad.__wrapped__)
trained()
assert "__dynamo_disable" in vars(torch.optim.Optimizer.zero_grad.__wrapped__)
assert torch._dynamo is sys.modules["torch._dynamo"]
"""

IN_FORKS = """
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader

import torch
import tests.helpers.internals

execute = SourceFileLoader.exec_module
executed = []

def recording(loader, module):
    if module.__name__.startswith("torch._dynamo"):
        executed.append(module.__name__)
    execute(loader, module)

def ends_well(script):
    try:
        exec(script, {})
        assert "torch._dynamo.convert_frame" in executed
        assert len(executed) == len(set(executed)), "executed twice"
    except BaseException:
        traceback.print_exc()
        return False
    return True

SourceFileLoader.exec_module = recording
assert "torch._dynamo" not in sys.modules
for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os._exit(0 if ends_well(script) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, script
"""


def importing(statement: str) -> str:
    return f"import torch\nfrom tests.helpers.internals import import_dynamo_late\nimport_dynamo_late()\n{statement}"


SHORT = (
    # This module refuses to set attributes.
    importing("import torch._dynamo.config"),
    importing("torch._dynamo.config.suppress_errors = True"),
)
FURTHER = (
    NOT_IMPORTED,
    IMPORTED,
    importing("from torch._dynamo import OptimizedModule"),
    importing("import torch.distributed.pipelining"),
)


@pytest.mark.parametrize("scripts", [SHORT, pytest.param(FURTHER, marks=pytest.mark.exhaustive)], ids=["1", "2"])
def test_each_compiler_module_is_executed_once_when_needed(scripts: tuple[str, ...]) -> None:
    """Each script in a fork of one process that has torch alone."""
    ended = run_python("-c", IN_FORKS, *scripts, timeout=110)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.exhaustive
def test_a_run_that_compiles_nothing_never_imports_it(tmp_path: Path) -> None:
    # Nor sympy, which would take 0.4 s while the FLOPs of a step are counted.
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "class Probe:\n"
        "    def on_fit_end(self):\n"
        "        slow = {'torch._dynamo.convert_frame', 'sympy'}\n"
        "        print('imported:', sorted(slow & sys.modules.keys()), flush=True)\n"
    )
    short = ("recipe=toy", "logger=jsonl", "trainer.max_steps=3", "trainer.log_every_n_steps=1")
    probe = "+callbacks.probe._target_=probe.Probe"
    ended = run_framework(*short, probe, "trainer.gpus=0", "strategy=ddp", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (metrics,) = tmp_path.glob("outputs/toy/*/metrics.jsonl")
    assert "tflop_per_s" in metrics.read_text()
    logs = [file.read_text() for file in tmp_path.glob("outputs/toy/*/logs/rank_*.log")]
    assert ["imported: []" in text for text in logs] == [True]
