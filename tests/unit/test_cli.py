"""The command: what it composes, what a job is handed, and what it says about mistakes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from framework import cli
from framework.config.saved import save_config
from framework.config.schema import Mode
from framework.errors import ConfigError, RunError
from framework.jobs.request import JobResult, Request
from framework.run_dir import RunDir, create_run_dir
from tests.helpers.command import run_framework, run_python
from tests.helpers.source import ROOT
from tests.unit.checkpoint.states import write_small


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """What reaches the job, which does nothing. The command runs in an empty folder, and leaves nothing in it."""
    received: list[Request] = []

    def receive(request: Request) -> int:
        received.append(request)
        return 0

    job_that(receive, monkeypatch)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield received
    assert list(folder.iterdir()) == []


def job_that(act: Callable[[Request], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `act`, which gives an exit status, in the place of job=train."""
    job = SimpleNamespace(main=lambda request: JobResult(act(request)), check=lambda _: None)
    monkeypatch.setitem(sys.modules, "framework.jobs.train", job)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said about a command that is wrong."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert len(printed.err.splitlines()) <= 8
    return printed.err


def test_a_job_is_handed_the_configuration(requests: list[Request]) -> None:
    warm: Any = object()
    assert cli.main(["recipe=toy", "trainer.gpus=0", "+model.extra=1", "hydra.verbose=false"], warm=warm) == 0
    (request,) = requests
    assert request.config.recipe == "toy"
    assert request.config.trainer.gpus == 0
    assert request.config.model["extra"] == 1
    assert request.raw["trainer"]["gpus"] == 0
    assert request.overrides == ("recipe=toy", "trainer.gpus=0", "+model.extra=1")
    assert request.replaced == {}
    assert request.warm is warm


@pytest.mark.parametrize(
    "typed", [("preflight=true", "preflight.seconds=3"), ("preflight.seconds=3", "preflight=true")]
)
def test_a_switch_goes_with_the_keys_below_it(requests: list[Request], typed: tuple[str, str]) -> None:
    assert cli.main([*typed]) == 0
    settings = requests[0].config.preflight
    assert (settings.enabled, settings.seconds) == (True, 3.0)


def test_the_status_is_the_jobs(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    job_that(lambda _: 75, monkeypatch)
    assert cli.main([]) == 75


def test_errors_of_a_job(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: BaseException) -> Callable[[Request], int]:
        def fail(_: Request) -> int:
            raise error

        return fail

    job_that(fail_with(RunError("the run failed")), monkeypatch)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "the run failed\n"
    job_that(fail_with(ConfigError("a wrong key")), monkeypatch)
    assert cli.main([]) == 2
    job_that(fail_with(KeyboardInterrupt()), monkeypatch)
    assert cli.main([]) == 130
    job_that(fail_with(ZeroDivisionError("unexpected")), monkeypatch)
    with pytest.raises(ZeroDivisionError, match="unexpected"):
        cli.main([])


def test_nothing_of_hydra_is_left(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = list(sys.argv)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    seen: list[object] = []

    def look(_: Request) -> int:
        seen.append((list(sys.argv), "HYDRA_FULL_ERROR" in os.environ))
        return 0

    job_that(look, monkeypatch)
    assert cli.main(["recipe=toy"]) == 0
    assert seen == [(arguments, False)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["recipe=digts"],
            "recipe=digts: recipe has no such option. Did you mean recipe=digits?\n    Options: digits, ",
        ),
        (["recipe="], "Options: digits, "),
        (["recipe=3"], "recipe=3: recipe has no such option."),
        (["recipe=null"], "Options: digits, "),
        (["callbacks=[ema,emo]"], "callbacks=emo: callbacks has no such option. Did you mean callbacks=ema?"),
        (["trainer.gpu=8"], "trainer.gpu=8: there is no such key. Did you mean trainer.gpus?"),
        (["+trainer.gpsu=2"], "trainer.gpsu=2: there is no such key. Did you mean trainer.gpus?"),
        (["++trainer.gpsu=2"], "Did you mean trainer.gpus?"),
        (["trainr.gpus=1"], "trainr.gpus=1: there is no such key. Did you mean trainer.gpus?"),
        (["trainr=debug"], "trainr=debug: there is no such key. Did you mean trainer?"),
        (["optimizer_lr=1"], "Did you mean optimizer.lr?"),
        (["gpus=1"], "Did you mean trainer.gpus?"),
        (["trainer={gpu:1}"], "trainer.gpu=1: there is no such key. Did you mean trainer.gpus?"),
        (["optimizer.nestrov=true"], "Did you mean optimizer.nesterov? To give optimizer one more keyword, write +"),
        (["callbacks.ema.decay=0.9"], "Choose it with callbacks=ema"),
        (["~trainer.nope"], "~trainer.nope: there is no such key."),
        (["~optimizer=adam"], "the group optimizer can't be left out"),
        (["~optimizer"], "optimizer is missing."),
        (["optimizer@here=adam"], "Write it without @here."),
        (["+optimizer=adam"], "Write optimizer=adam."),
        (["+trainer.gpus=1"], "trainer.gpus is there already. Write trainer.gpus=1."),
        (["trainer.gpus"], "trainer.gpus: this can't be read. What is set is written key=value."),
        (["gpus", "8"], "gpus: this can't be read."),
        (["seed=(1"], "seed=(1: this value can't be read."),
        (["seed=1,2"], "several values start several runs, which needs -m."),
        (["seed=range(3)"], "several values start several runs, which needs -m."),
        (["optimizer.lr=${nope}"], "optimizer.lr: Interpolation key 'nope' not found"),
        (["optimizer.lr=${nope:x}"], "optimizer.lr: Unsupported interpolation type nope"),
        (["+model.width=???"], "model.width has no value yet. Give it one: model.width=VALUE"),
        (["hydra.foo=1"], "Could not override 'hydra.foo'"),
        (["hydra/launcher=nope"], "There is no hydra/launcher/nope.yaml"),
        (["--config-name", "nope"], "There is no nope.yaml."),
        (["--config-dir", "/nope"], "'/nope' not found"),
        (["--recipe=toy"], "Keys are written without dashes: recipe=toy"),
        (["--hepl"], "`--hydra-help` lists the options."),
        (["--resolve"], "--resolve"),
        (["--cfg", "job", "-p", "nope"], "package 'nope' not found"),
        (["--cfg", "job", "recipe=digts"], "Did you mean recipe=digits?"),
        (["-m", "optimizer=sgd,admm"], "optimizer=admm: optimizer has no such option. Did you mean optimizer=adam?"),
        (["-m", "seed=1,-2"], "seed=-2: must be"),
        (["seed=-1"], "seed=-1: must be a whole number"),
        (["trainer.precision=bf16"], "Did you mean trainer.precision=bf16-mixed?"),
        (["+data.sampler=x"], "data.sampler=x: there is no such key. data has datasets, "),
        (["+callbacks._target_=a.B"], "must be below a name: callbacks.NAME._target_"),
        (["job=tain"], "Did you mean job=train?"),
        (["trainer.max_epochs=null"], "both null"),
        (["resume="], "must be one run directory"),
        (["resume=a,b", "-m"], "must be one run directory"),
        (["resume=nowhere"], "resume=nowhere: there is no such directory."),
    ],
)
def test_mistakes(requests: list[Request], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *arguments)
    assert requests == []


def test_all_typed_mistakes_are_shown_together(requests: list[Request], capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "gpus=2", "trainer.gpsu=3", "optimzer.lr=3", "backend=glo")
    assert text.startswith("The configuration has 4 mistakes:\n")
    assert text.count("Did you mean") == 4


def test_hydras_own_traceback_can_be_asked_for(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not override"):
        cli.main(["trainer.gpu=8"])


TOY = """# @package _global_
defaults:
  - override /model: toy
  - override /data: toy
  - override /task: regression
"""


class TestOwnFolder:
    """A folder `conf` and Python files of the user's, anywhere."""

    @pytest.fixture(autouse=True)
    def folder(self, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        place = tmp_path / "own"
        (place / "conf" / "recipe").mkdir(parents=True)
        monkeypatch.chdir(place)
        return place

    def test_a_recipe(self, requests: list[Request], folder: Path) -> None:
        recipe = f"{TOY}  - override /optimizer: adam\nseed: 7\n"
        (folder / "conf" / "recipe" / "mine.yaml").write_text(recipe)
        assert cli.main(["recipe=mine"]) == 0
        config = requests[0].config
        assert (config.recipe, config.seed, config.optimizer["_target_"]) == ("mine", 7, "torch.optim.Adam")
        assert str(folder) in sys.path

    def test_a_file_comes_before_the_frameworks(self, requests: list[Request], folder: Path) -> None:
        (folder / "conf" / "checkpoint").mkdir()
        own = "enabled: true\nmonitor: val/loss\nmode: max\nsave_top_k: 2\nevery_n_steps: 5\nevery_n_epochs: null\n"
        (folder / "conf" / "checkpoint" / "default.yaml").write_text(own)
        assert cli.main(["recipe=toy"]) == 0
        assert requests[0].config.checkpoint.save_top_k == 2
        assert requests[0].config.checkpoint.mode is Mode.MIN  # the recipe's

    def test_its_options_are_suggested(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "conf" / "recipe" / "mine.yaml").write_text("# @package _global_\n")
        assert "Did you mean recipe=mine?" in refused(capsys, "recipe=mien")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("trainer:\n  gpus: [1\n", "mine.yaml, line 8, column 1 is not valid YAML"),
            (
                "  - override /optimizer: addam\n",
                "There is no optimizer/addam.yaml, which a file of the configuration asks for",
            ),
            ("trainer:\n  gpsu: 1\n", "Did you mean trainer.gpus?"),
            ("resume: somewhere\n", "Type it on the command line"),
        ],
    )
    def test_mistakes_in_a_file(
        self, folder: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
    ) -> None:
        (folder / "conf" / "recipe" / "mine.yaml").write_text(TOY + content)
        assert said in refused(capsys, "recipe=mine")

    @pytest.mark.parametrize("header", ["", "# Mine.\n# @package _global_\n", "# @package _global\n"])
    def test_a_recipe_without_its_package_line(
        self, folder: Path, capsys: pytest.CaptureFixture[str], header: str
    ) -> None:
        file = folder / "conf" / "recipe" / "mine.yaml"
        said = f"{file}: the first line must be `# @package _global_`"
        file.write_text(
            header + TOY.partition("\n")[2]
        )  # with a `defaults` list Hydra fails, with keys alone the parser
        assert refused(capsys, "recipe=mine").startswith(said)
        file.write_text(header + "trainer:\n  max_epochs: 3\n")
        assert refused(capsys, "recipe=mine").startswith(said)

    def test_an_option_with_the_package_line_of_a_recipe(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "conf" / "optimizer").mkdir()
        file = folder / "conf" / "optimizer" / "mine.yaml"
        file.write_text("# @package _global_\n_target_: torch.optim.Adam\nlr: 0.1\n")
        assert f"{file}: remove the line `# @package _global_`" in refused(capsys, "recipe=toy", "optimizer=mine")

    def test_a_switch_in_a_recipe(
        self, requests: list[Request], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = folder / "conf" / "recipe" / "mine.yaml"
        file.write_text(TOY + "preflight: true\n")
        assert cli.main(["recipe=mine"]) == 0
        assert requests[0].config.preflight.enabled
        said = "there are no keys below that. Write preflight: {enabled: true} there."
        assert said in refused(capsys, "recipe=mine", "preflight.seconds=3")
        file.write_text(TOY + "preflight: {enabled: true, seconds: 5}\n")
        assert cli.main(["recipe=mine", "preflight=false"]) == 0
        settings = requests[1].config.preflight
        assert (settings.enabled, settings.seconds) == (False, 5.0)

    def test_another_projects_config_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "conf" / "config.yaml").write_text("recipe: some\n")
        assert cli.main([]) == 2
        assert f"{folder / 'conf' / 'config.yaml'} was used instead" in capsys.readouterr().err


class TestSweep:
    def test_every_run_is_checked_then_started(
        self, requests: list[Request], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["-m", "recipe=toy", "seed=1,2", "optimizer=sgd,adam"]) == 0
        assert [(each.config.seed, each.replaced) for each in requests] == [
            (1, {}),
            (1, {"optimizer=adam": "sgd"}),
            (2, {}),
            (2, {"optimizer=adam": "sgd"}),
        ]
        assert requests[0].overrides == ("recipe=toy", "seed=1", "optimizer=sgd")
        assert "[3] seed=2 optimizer=adam  finished" in capsys.readouterr().out
        assert [each.place.number for each in requests if each.place] == [0, 1, 2, 3]
        assert len({each.place.folder for each in requests if each.place}) == 1

    def test_a_failed_run_does_not_stop_the_others(
        self, requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def act(request: Request) -> int:
            requests.append(request)
            if request.config.seed == 1:
                raise RunError("it failed")
            if request.config.seed == 2:
                raise ZeroDivisionError("unexpected")
            return 1 if request.config.seed == 3 else 0

        job_that(act, monkeypatch)
        assert cli.main(["-m", "seed=1,2,3,4"]) == 1
        assert len(requests) == 4
        printed = capsys.readouterr()
        assert "it failed" in printed.err
        assert "ZeroDivisionError: unexpected" in printed.err
        assert "[2] seed=3  FAILED (1)" in printed.out
        assert "3 of 4 jobs failed: 0, 1, 2" in printed.out

    def test_ctrl_c_ends_all(self, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(request: Request) -> int:
            requests.append(request)
            raise KeyboardInterrupt

        job_that(interrupt, monkeypatch)
        assert cli.main(["-m", "seed=1,2"]) == 130
        assert len(requests) == 1


class TestResume:
    @pytest.fixture
    def run_dir(self, requests: list[Request], tmp_path: Path) -> RunDir:
        """A run whose configuration differs in ways that today's `conf/` and what is typed don't tell."""
        assert cli.main(["recipe=toy", "optimizer.lr=0.5", "trainer.max_epochs=4", "callbacks=ema"]) == 0
        request = requests.pop()
        request.raw["data"]["batch_size"] = 77
        run_dir = create_run_dir(tmp_path / "outputs" / "toy")
        save_config(run_dir, request)
        return run_dir

    def test_the_saved_configuration_is_used(self, requests: list[Request], run_dir: RunDir) -> None:
        assert cli.main([f"resume={run_dir.path}"]) == 0
        (request,) = requests
        before = yaml.safe_load(run_dir.config_file.read_text())
        assert request.raw == {**before, "resume": str(run_dir.path)}
        assert request.config.resume == str(run_dir.path)
        assert request.config.data.batch_size == 77
        assert request.overrides == ("recipe=toy", "optimizer.lr=0.5", "trainer.max_epochs=4", "callbacks=ema")

    def test_what_is_typed_is_applied(self, requests: list[Request], run_dir: RunDir) -> None:
        assert cli.main(["trainer.max_epochs=9", f"resume={run_dir.path}", "+model.extra=[1]", "~callbacks.ema"]) == 0
        (request,) = requests
        assert request.config.trainer.max_epochs == 9
        assert request.config.model["extra"] == [1]
        assert request.config.callbacks == {}
        assert request.config.optimizer["lr"] == 0.5
        assert request.config.data.batch_size == 77
        assert "trainer.max_epochs=9" in request.overrides
        assert "trainer.max_epochs=4" not in request.overrides

    def test_a_typed_group_is_replaced_whole(self, requests: list[Request], run_dir: RunDir) -> None:
        assert cli.main([f"resume={run_dir.path}", "optimizer=adam", "data=toy"]) == 0
        (request,) = requests
        assert request.config.optimizer["_target_"] == "torch.optim.Adam"
        assert request.config.optimizer["lr"] == 0.001
        assert request.config.data.batch_size == 20

    def test_it_can_be_resumed_again(self, requests: list[Request], run_dir: RunDir) -> None:
        assert cli.main([f"resume={run_dir.path}", "trainer.max_epochs=9"]) == 0
        save_config(run_dir, requests.pop())
        run_dir.checkpoints.mkdir()
        assert cli.main([f"resume={run_dir.checkpoints}", "recipe=toy"]) == 0
        (request,) = requests
        assert request.config.trainer.max_epochs == 9
        assert request.config.data.batch_size == 77
        assert request.config.resume == str(run_dir.path)

    def test_a_path_that_hydra_would_want_quoted(
        self, requests: list[Request], run_dir: RunDir, tmp_path: Path
    ) -> None:
        strange = run_dir.path.rename(tmp_path / "a (b), c=d")
        assert cli.main([f"resume={strange}"]) == 0
        assert requests[0].config.resume == str(strange)

    def test_one_of_its_checkpoints(
        self, requests: list[Request], run_dir: RunDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_small(run_dir.checkpoints, 20)
        step = run_dir.checkpoints / "step_00000020"
        assert cli.main([f"resume={step}"]) == 0
        assert requests.pop().config.resume == str(step)
        (step / "manifest.json").unlink()
        assert "is not complete" in refused(capsys, f"resume={step}")

    def test_a_run_of_a_recipe_that_is_elsewhere_says_where_to_go(
        self, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_dir.overrides_file.write_text("[recipe=mine, seed=3]")
        run_dir.config_file.write_text(run_dir.config_file.read_text().replace("recipe: toy", "recipe: mine"))
        told = refused(capsys, f"resume={run_dir.path}", "trainer.max_epochs=9")
        assert "recipe=mine: recipe has no such option" in told
        assert "started with: recipe=mine seed=3" in told
        assert "Go to the folder it was started from" in told

    def test_null_resumes_nothing(self, requests: list[Request]) -> None:
        assert cli.main(["resume=null"]) == 0
        assert requests[0].config.resume is None

    def test_what_can_not_go_with_it(
        self, requests: list[Request], run_dir: RunDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        resume = f"resume={run_dir.path}"
        assert "that run's recipe is toy" in refused(capsys, resume, "recipe=digits")
        assert "resume can't go with init_from" in refused(capsys, resume, "init_from=x")
        assert "resume can't go with several runs" in refused(capsys, resume, "-m", "seed=1,2")
        assert "Did you mean trainer.gpus?" in refused(capsys, resume, "trainer.gpsu=2")
        assert requests == []


ANSWERS = [
    ["--help"],
    ["--cfg", "job"],
    ["--cfg", "job", "--resolve", "recipe=toy"],
    ["--info", "defaults"],
]


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
def test_commands_that_only_answer(tmp_path: Path, arguments: list[str]) -> None:
    """In any folder, which stays as it is."""
    result = run_framework(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_lists_groups_and_options(tmp_path: Path) -> None:
    text = run_framework("--help", cwd=tmp_path).stdout
    assert "recipe: digits, mnist, mnist_fast, toy, toy_model_parallel" in text
    assert "python -m framework recipe=toy" in text
    assert "powered by Hydra" not in text


def test_cfg_job_is_the_configuration(tmp_path: Path) -> None:
    shown = yaml.safe_load(run_framework("--cfg", "job", "--resolve", "recipe=toy", cwd=tmp_path).stdout)
    assert shown["recipe"] == "toy"
    assert "hydra" not in shown


COMPLETE = """
framework() { "$PYTHON" -m framework "$@"; }
eval "$(framework -sc install=bash)"
complete_line() {
    COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($1) COMPREPLY=()
    _framework_completion
    echo "${COMPREPLY[*]}"
}
complete_line "framework trainer.max_ep"
complete_line "$PYTHON -m framework recipe=toy model=toy_"
complete_line "$PYTHON -m http.server recipe=toy_"
eval "$(framework -sc uninstall=bash)"
complete -p framework python
"""


def test_bash_completes_the_command_in_both_forms(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", "--norc", "-c", COMPLETE]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    # Without the `=`, at which Bash begins a word of its own.
    assert result.stdout.splitlines() == ["trainer.max_epochs=", "toy_model_parallel", ""]
    assert result.stderr.count("no completion specification") == 2
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_frameworks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    version = metadata.version
    others = f"Python {platform.python_version()}, torch {version('torch')}, hydra-core {version('hydra-core')}"
    assert capsys.readouterr().out == f"framework {version('framework')} ({others})\n"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["--cfg", "job"], ["trainer.gpsu=2"], ["+trainer.gpsu=2"]], ids=" ".join
)
def test_torch_stays_out(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom framework import cli\n"
        f"cli.main({arguments!r})\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    result = run_python("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
