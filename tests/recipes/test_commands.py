"""The command lines people type, from an empty folder, as with an installed package; and what a run leaves there.

Each command is run once; several tests look at what it did. Commands that would train long are cut by `CUT`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from framework.config.checks import check
from framework.config.parse import parse
from tests.helpers import results
from tests.helpers.command import run_framework, run_python, started_framework
from tests.helpers.processes import describe

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

CUT = "trainer.max_epochs=1"
RUN_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}")


@dataclass(frozen=True)
class Ran:
    """A command that succeeded: where, what it printed, and its run directory."""

    folder: Path
    stdout: str
    stderr: str
    run_dir: Path

    def printed_command(self, name: str) -> list[str]:
        """The words of what the closing summary says under `name`."""
        (line,) = re.findall(rf"^  {name} +(.+)$", self.stdout, re.MULTILINE)
        return shlex.split(line)


Command = Callable[..., Ran]


def ran(folder: Path, *arguments: str) -> Ran:
    result = run_framework(*arguments, cwd=folder, timeout=110)
    assert result.returncode == 0, result.stderr
    # Nothing else is left where it was typed.
    assert {path.name for path in folder.iterdir()} == {"outputs"}
    (run_dir,) = folder.glob("outputs/*/*")
    return Ran(folder, result.stdout, result.stderr, run_dir)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return lambda *arguments: ran(tmp_path_factory.mktemp("empty"), *arguments)


# python -m framework


@pytest.fixture(scope="module")
def default(command: Command) -> Ran:
    return command()


def test_the_default_recipe_recognises_digits(default: Ran) -> None:
    found = results.results(default.run_dir)
    assert default.run_dir.parent == default.folder / "outputs" / "digits"
    assert found["test"]["metrics"]["test/accuracy"] >= 0.97
    assert found["seconds"] < 60
    losses = list(results.curve(default.run_dir, "train/loss").values())
    assert losses[-1] < losses[0] / 4


def test_best_is_the_best_on_validation_and_is_what_was_tested(default: Ran) -> None:
    accuracies = results.curve(default.run_dir, "val/accuracy")
    assert accuracies[results.pointed(default.run_dir, "best")] == max(accuracies.values())
    assert results.pointed(default.run_dir, "last") == max(accuracies)
    found = results.results(default.run_dir)
    best, last = results.pointed(default.run_dir, "best"), max(accuracies)
    assert (found["best"]["step"], found["last"]["step"], found["test"]["step"]) == (best, last, best)
    for part in ("best", "last"):
        assert found[part]["metrics"]["val/accuracy"] == accuracies[found[part]["step"]]
    shown = default.stdout
    assert all(f"{name} (step {step})" in shown for name, step in (("best", best), ("last", last)) if best != last)


def test_everything_lies_where_it_should(default: Ran) -> None:
    assert RUN_NAME.fullmatch(default.run_dir.name)
    names = {path.name for path in default.run_dir.iterdir()}
    assert names == {
        *("config.yaml", "overrides.yaml", "run.json"),
        *("checkpoints", "tensorboard", "metrics.jsonl", "logs"),
    }
    step = f"step_{results.pointed(default.run_dir, 'last'):08d}"
    assert {path.name for path in (default.run_dir / "checkpoints" / step).iterdir()} == {
        *("model.pt", "training.pt", "generators.pt", "config.yaml", "manifest.json")
    }


def test_tensorboard_has_the_curves_and_the_config(default: Ran) -> None:
    events = results.events(default.run_dir)
    assert set(events.Tags()["scalars"]) == {
        *("train/loss", "train/lr", "train/grad_norm", "train/samples_per_s", "time/data"),
        *("val/loss", "val/accuracy", "test/loss", "test/accuracy"),
    }
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(shown) == yaml.safe_load((default.run_dir / "config.yaml").read_text())


def test_what_is_printed_is_the_story_of_the_run(default: Ran) -> None:
    lines = default.stdout.splitlines()
    assert lines[0].startswith("Training digits: 1 process")
    assert "ConvNet" in default.stdout
    metrics = results.metrics(default.run_dir)
    for name, value in metrics.items():
        assert re.search(rf"^ +{name} .*\b{value:.4f}\b", default.stdout, re.MULTILINE), name
    assert "\x1b" not in default.stdout  # plain lines: this is no terminal
    assert "\r" not in default.stdout
    assert default.stderr == ""


def test_run_json_says_what_was_run(default: Ran) -> None:
    record = results.run_file(default.run_dir)
    assert record["status"] == "finished"
    assert record["command"] == "python -m framework"
    assert record["started"] <= record["ended"]
    assert {"python", "framework", "torch", "torchvision", "hydra-core", "omegaconf"} <= record["versions"].keys()
    assert "not installed" not in (record["versions"]["torch"], record["versions"]["hydra-core"])
    assert record["git"] is None  # an empty folder is no repository
    assert record["topology"]["world_size"] == 1


def test_the_commands_at_the_end_are_right(default: Ran) -> None:
    """Resuming a run that has ended trains nothing, and says the same results."""
    resume = default.printed_command("resume")
    assert resume[:3] == ["python", "-m", "framework"]
    before = results.results(default.run_dir)
    checkpoints = results.saved_steps(default.run_dir)
    again = run_framework(*resume[3:], cwd=default.folder)
    assert again.returncode == 0, again.stderr
    after = results.results(default.run_dir)
    assert [after[key] for key in ("steps", "best", "last", "test")] == [
        before[key] for key in ("steps", "best", "last", "test")
    ]
    assert results.saved_steps(default.run_dir) == checkpoints
    look = default.printed_command("look")
    assert look == ["tensorboard", "--logdir", "outputs"]
    # TensorBoard's own word on what that folder holds.
    shown = run_python("-m", "tensorboard.main", *look[1:], "--inspect", cwd=default.folder)
    assert shown.returncode == 0, shown.stderr
    assert "val/accuracy" in shown.stdout
    assert default.run_dir.name in shown.stdout


# python -m framework recipe=toy; python -m framework resume=outputs/...


@pytest.fixture(scope="module")
def resumed(command: Command) -> Ran:
    """Stopped in the third epoch, and gone on with by the command it printed."""
    stopped = command("recipe=toy", "trainer.max_steps=195")
    resume = stopped.printed_command("resume")
    result = run_framework(*resume[3:], "trainer.max_steps=null", cwd=stopped.folder)
    assert result.returncode == 0, result.stderr
    return ran_again(stopped, result.stdout)


def ran_again(before: Ran, stdout: str) -> Ran:
    (run_dir,) = before.folder.glob("outputs/*/*")
    assert run_dir == before.run_dir
    return Ran(before.folder, stdout, "", run_dir)


def test_toys_loss_falls_over_a_resume_as_one_curve(resumed: Ran) -> None:
    losses = results.curve(resumed.run_dir, "train/loss")
    assert list(losses) == sorted([195, *range(50, 801, 50)])
    values = list(losses.values())
    assert values[-1] < values[0] / 2
    assert results.repeated(resumed.run_dir) == {}
    for name in ("train/loss", "val/loss"):
        shown = [event.step for event in results.events(resumed.run_dir).Scalars(name)]
        assert shown == list(results.curve(resumed.run_dir, name))
    assert "Resuming toy" in resumed.stdout
    assert "Resuming after step 195" in resumed.stdout


def test_a_resumed_run_remembers_its_beginnings(resumed: Ran) -> None:
    record = results.run_file(resumed.run_dir)
    assert record["status"] == "finished"
    assert "resume=" in record["command"]
    (earlier,) = record["earlier"]
    assert earlier["command"] == "python -m framework recipe=toy trainer.max_steps=195"
    heads = re.findall(r"INFO pid (\d+), rank 0,", results.log(resumed.run_dir))
    assert len(set(heads)) == 2


# python -m framework recipe=toy trainer.gpus=0 topology.procs_per_node=2, and its model-parallel sister


@pytest.fixture(scope="module", params=["toy", "toy_model_parallel"])
def two_processes(request: pytest.FixtureRequest, command: Command) -> Ran:
    return command(f"recipe={request.param}", "trainer.gpus=0", "topology.procs_per_node=2")


def test_two_processes_learn(two_processes: Ran) -> None:
    losses = list(results.curve(two_processes.run_dir, "train/loss").values())
    assert losses[-1] < losses[0] / 2
    assert results.results(two_processes.run_dir)["steps"] == 10 * 40
    assert "2 processes, CPU" in two_processes.stdout


def test_each_ranks_log_begins_with_who_it_is(two_processes: Ran) -> None:
    devices = "cpu, cpu" if "model_parallel" in str(two_processes.run_dir) else "cpu"
    pids = set()
    for rank in range(2):
        head = results.log(two_processes.run_dir, rank).splitlines()[0]
        found = re.search(
            rf"pid (\d+), rank {rank}, local rank {rank}, world size 2, backend gloo, node 0 \(.+\), devices (.+)", head
        )
        assert found, head
        pids.add(found[1])
        assert found[2] == devices
    assert len(pids) == 2
    assert {path.name for path in (two_processes.run_dir / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}


def test_every_rank_reads_one_config_and_it_reads_back_the_same(two_processes: Ran) -> None:
    text = (two_processes.run_dir / "config.yaml").read_text()
    config = parse(yaml.safe_load(text))
    check(config)
    assert parse(yaml.safe_load(yaml.safe_dump(yaml.safe_load(text)))) == config
    assert (config.trainer.gpus, config.topology.procs_per_node) == (0, 2)
    assert config.recipe == two_processes.run_dir.parent.name
    assert "${" not in text
    for saved in (two_processes.run_dir / "checkpoints").glob("step_*/config.yaml"):
        assert saved.read_text() == text
    overrides = yaml.safe_load((two_processes.run_dir / "overrides.yaml").read_text())
    assert overrides == [f"recipe={config.recipe}", "trainer.gpus=0", "topology.procs_per_node=2"]


# python -m framework recipe=digits backend=gloo backend.timeout=90s strategy=ddp


def test_a_backend_a_timeout_and_a_strategy(command: Command) -> None:
    run = command("recipe=digits", "backend=gloo", "backend.timeout=90s", "strategy=ddp", CUT)
    config = parse(yaml.safe_load((run.run_dir / "config.yaml").read_text()))
    assert (config.backend.name.value, config.backend.timeout) == ("gloo", 90.0)
    assert config.strategy["_target_"] == "framework.strategies.DDP"
    assert "backend gloo" in results.log(run.run_dir)
    assert results.metrics(run.run_dir)["test/accuracy"] > 0.5
    # Saved without DDP's prefix.
    assert all(not name.startswith("module.") for name in results.weights(run.run_dir))


# python -m framework recipe=digits launcher=in_place


def test_in_place_is_one_process(tmp_path: Path) -> None:
    arguments = ("recipe=digits", "launcher=in_place", CUT)
    with started_framework(*arguments, cwd=tmp_path) as started:
        servers = 0
        while started.process.poll() is None:
            servers += sum("fork_server" in describe(process) for process in started.processes())
            time.sleep(0.1)
        assert started.wait(timeout=1) == 0, started.printed()
        started.assert_all_gone()
        pid = started.process.pid
    (run_dir,) = tmp_path.glob("outputs/digits/*")
    assert servers == 0
    assert f"pid {pid}, rank 0" in results.log(run_dir)
    assert results.pointed(run_dir, "last") == results.results(run_dir)["steps"] == 40
    assert results.run_file(run_dir)["status"] == "finished"


# Inside a repository


def test_the_revision_and_its_changes_are_noted(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "note").write_text("before\n")
    for step in (["init", "-q"], ["add", "note"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *step], check=True)
    (tmp_path / "note").write_text("after\n")
    result = run_framework("recipe=toy", "trainer.fast_dev_run=true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    noted = results.run_file(run_dir)["git"]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert noted["revision"] == head
    assert "-before\n+after" in noted["diff"]
