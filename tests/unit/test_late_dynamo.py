"""In processes of their own: what is imported can't be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import run_framework, run_python

STEPS = """
import sys
import torch
from torch import nn

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

NOTHING_IMPORTS_IT = f"""{STEPS}
import inspect
from framework.late_dynamo import late_dynamo

with late_dynamo():
    late = trained()
    wrapped()
    from torch.optim import Optimizer
    asked = Optimizer.add_param_group.__wrapped__
    assert "__dynamo_disable" in vars(asked), "torch keeps the answer elsewhere now"
    with late_dynamo():  # a run within a run
        trained()
    assert sys.modules["torch._dynamo"] is torch._dynamo
    inspect.getmodule(inspect.currentframe())  # looks at the file of every module
    assert torch._dynamo.__spec__.name == "torch._dynamo" and not hasattr(torch._dynamo, "__warningregistry__")
    said = torch._dynamo.utils.get_optimize_ddp_mode()
    kept = torch._dynamo
    assert REAL not in sys.modules
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
assert "__dynamo_disable" not in vars(asked), "torch would go on with an answer that holds for no compiler"

assert torch.equal(trained(), late)
assert REAL in sys.modules and sys.modules["torch._dynamo"] is torch._dynamo is not kept
assert vars(asked)["__dynamo_disable"] is not asked
assert said == torch._dynamo.utils.get_optimize_ddp_mode()
assert kept.config is torch._dynamo.config  # who has kept it asks the real one
with late_dynamo():
    assert sys.modules["torch._dynamo"] is torch._dynamo is not kept
"""

ASKING_IMPORTS_IT = f"""{STEPS}
from framework.late_dynamo import late_dynamo

with late_dynamo():
    trained()
    first = torch._dynamo
    first.utils.counters  # a part of which some names are answered
    assert REAL in sys.modules and torch._dynamo is sys.modules["torch._dynamo"] is not first
    import torch._dynamo.config
    first.config.suppress_errors = True
    assert torch._dynamo.config.suppress_errors
    first.something = 1
    assert torch._dynamo.something == 1
    calls = []
    @first.disable
    def left_alone(x):
        calls.append(torch.compiler.is_compiling())
        return x + 1
    @torch.compile(backend="eager")
    def compiled(x):
        first.graph_break()
        return left_alone(x) * 2
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0] and calls == [False]
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


BY_NAME = """
import sys
import torch
from framework.late_dynamo import late_dynamo

with late_dynamo():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert "torch._dynamo.convert_frame" not in sys.modules
    before = len(sys.meta_path)
    {statement}
    assert len(sys.meta_path) < before
    from torch._dynamo import config, eval_frame, exc, utils
    import torch._dynamo.backends.registry
    assert config is eval_frame.config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
    inside = sys.modules["torch._dynamo.convert_frame"]
    assert exc is torch._dynamo.exc is sys.modules["torch._dynamo.exc"] is inside.exc
    assert torch._dynamo.backends.registry is sys.modules["torch._dynamo.backends.registry"]
    for name in ("config", "exc", "utils"):
        spec = sys.modules["torch._dynamo." + name].__spec__
        assert spec.origin.endswith(name + ".py") and spec.loader.path == spec.origin
    {after}
"""


@pytest.mark.parametrize(
    ("statement", "after"),
    [
        (
            "import torch._dynamo.config as mine",
            "mine.suppress_errors = True; assert eval_frame.config.suppress_errors",
        ),
        ("left_alone = torch._dynamo.disable(lambda x: x)", "assert left_alone(torch.ones(1)) == 1"),
        pytest.param(
            "from torch._dynamo.exc import Unsupported",
            "assert Unsupported is inside.exc.Unsupported",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("import torch._dynamo.decorators", "pass", marks=pytest.mark.exhaustive),
        pytest.param(
            "compiled = torch.compile(torch.sin, backend='eager')",
            "compiled(torch.ones(2)); assert utils.counters['stats']",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_module_in_it_is_there_once_whichever_way_it_is_first_asked_for(statement: str, after: str) -> None:
    do(BY_NAME.format(statement=statement, after=after))


def do(script: str) -> None:
    ended = run_python("-c", script)
    assert ended.returncode == 0, ended.stderr


def test_what_an_optimizer_and_ddp_ask_is_answered_without_it_and_the_same() -> None:
    do(NOTHING_IMPORTS_IT)


def test_any_other_question_imports_the_real_one_for_good() -> None:
    do(ASKING_IMPORTS_IT)


def test_a_run_never_imports_it_unless_it_compiles(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "class Probe:\n"
        "    def on_fit_end(self):\n"
        "        print('imported:', 'torch._dynamo.convert_frame' in sys.modules, flush=True)\n"
    )
    short = ("recipe=toy", "trainer.gpus=0", "trainer.max_steps=3", "+callbacks.probe._target_=probe.Probe")
    ended = run_framework(*short, "topology.procs_per_node=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    logs = [file.read_text() for file in tmp_path.glob("outputs/*/*/logs/rank_*.log")]
    assert [("imported: False" in text, "imported: True" in text) for text in logs] == [(True, False)] * 2
