"""In processes of their own: what is imported can't be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import run_framework, run_python

STEPS = """
import sys
import torch
from torch import nn
from framework.late_dynamo import late_dynamo

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
import inspect

with late_dynamo():
    late = trained()
    wrapped()
    with late_dynamo():  # a run within a run
        trained()
    inspect.getmodule(inspect.currentframe())  # looks at the file of every module
    said, kept = torch._dynamo.utils.get_optimize_ddp_mode(), torch._dynamo
    assert REAL not in sys.modules
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)

assert torch.equal(trained(), late)
assert REAL in sys.modules and sys.modules["torch._dynamo"] is torch._dynamo is not kept
assert said == torch._dynamo.utils.get_optimize_ddp_mode()
assert kept.config is torch._dynamo.config  # whoever has kept it gets the real one
from torch.optim import Optimizer
asked = Optimizer.add_param_group.__wrapped__
assert vars(asked)["__dynamo_disable"] is not asked, "torch would use an answer that holds for no compiler"
"""

IMPORTED = f"""{STEPS}
with late_dynamo():
    trained()
    first = torch._dynamo
    STATEMENT
    assert REAL in sys.modules and torch._dynamo is sys.modules["torch._dynamo"] is not first
    from torch._dynamo import config, eval_frame, exc
    import torch._dynamo.backends.registry
    assert config is eval_frame.config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
    assert exc is torch._dynamo.exc is sys.modules["torch._dynamo.exc"] is sys.modules[REAL].exc
    first.config.suppress_errors = True
    assert torch._dynamo.config.suppress_errors
    frames = []
    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward
    model = nn.Linear(3, 2)
    model.compile(backend=backend)
    model(torch.ones(5, 3)).sum().backward()
    assert len(frames) == 1
    trained()
assert torch._dynamo is sys.modules["torch._dynamo"] is not first
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script",
    [
        NOT_IMPORTED,
        IMPORTED.replace("STATEMENT", "import torch._dynamo.config"),
        *(
            pytest.param(IMPORTED.replace("STATEMENT", statement), marks=pytest.mark.exhaustive)
            for statement in (
                "left_alone = torch._dynamo.disable(lambda x: x); assert left_alone(1) == 1",
                "from torch._dynamo.exc import Unsupported",
                "torch.compile(torch.sin, backend='eager')(torch.ones(2))",
            )
        ),
    ],
    ids=["optimizers and DDP", "import", "disable", "from", "compile"],
)
def test_the_compiler_is_imported_only_when_it_is_needed_and_then_once(script: str) -> None:
    ended = run_python("-c", script)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.exhaustive
def test_a_run_never_imports_it_unless_it_compiles(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "class Probe:\n"
        "    def on_fit_end(self):\n"
        "        print('imported:', 'torch._dynamo.convert_frame' in sys.modules, flush=True)\n"
    )
    short = ("recipe=toy", "logger=none", "trainer.max_steps=3", "+callbacks.probe._target_=probe.Probe")
    ended = run_framework(*short, "trainer.gpus=0", "topology.procs_per_node=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    logs = [file.read_text() for file in tmp_path.glob("outputs/toy/*/logs/rank_*.log")]
    assert [("imported: False" in text, "imported: True" in text) for text in logs] == [(True, False)] * 2
