"""The command: what it composes, what a job is handed, and what it says about mistakes."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from framework.errors import RunError
from tests.helpers.answers import Answer, assert_refused, run_all
from tests.helpers.internals import (
    Gpu,
    JobResult,
    Request,
    RunDir,
    Train,
    compose,
    create_run_dir,
    hardware_module,
    save_config,
    slots_module,
)
from tests.unit.config.raw import composed

WRONG: dict[str, list[str]] = {
    # What can't be composed: every mistake in what was typed, with the nearest name
    "recipe=digts callbacks=[ema,emo] backend=glo strategy=ddpp": [
        "The configuration has 4 mistakes",
        "recipe=digts: recipe has no such option. Did you mean recipe=digits?",
        "Options: blank, cartpole, digits, ",
        "Did you mean callbacks=ema?",
        "Did you mean backend=gloo?",
        "Did you mean strategy=ddp?",
    ],
    "trainer.gpu=8 +data.batchsize=2 ++trainer.epochs=3 trainr.gpus=1 trainr=debug optimizer_lr=1 gpus=1 "
    "optimizer.nestrov=true callbacks.ema.decay=0.9 ~trainer.nope": [
        "The configuration has 10 mistakes",
        "trainer.gpu=8: there is no such key. Did you mean trainer.gpus=8?",
        "trainr=debug: there is no such key",
        "Did you mean data.batch_size=2?",
        "trainer.epochs=3: there is no such key. Type trainer.max_epochs=3",
        "Did you mean optimizer.lr=1?",
        "Did you mean optimizer.nesterov=true? To pass optimizer another keyword, write +",
        "~trainer.nope: there is no",
        "Choose it with callbacks=ema",
    ],
    "seed=abc data.batch_size=-3 optimizer=adma trainer.gpsu=1": [
        "The configuration has 4 mistakes",
        "optimizer=adma: optimizer has no such option",
        "Did you mean trainer.gpus=1?",
        "seed=abc: must be a whole number",
        "data.batch_size=-3: must be a whole number at least 1",
    ],
    "fit": ["Type job=train, or leave it out."],
    "test recipe=toy": ["Type job=eval checkpoint.path=RUN"],
    "-recipe=toy": ["Type recipe=toy"],
    "job=recipes.nowhere.f": ["job=recipes.nowhere.f: there is no nowhere in recipes."],
    "+trainer.gpus=1": ["An item is already at 'trainer.gpus'."],
    "'seed=(1' data.batch_size=1,2 'data.eval_batch_size=range(3)'": [
        "seed=(1: this value can't be read.",
        "data.eval_batch_size=range(3)",
        "data.batch_size=1,2: several values start several runs, which needs -m.",
    ],
    "--cfg=jbo": ["`--hydra-help` lists the options."],
    # What isn't a configuration: keys, types, ranges
    "~optimizer +trainer.gpsu=2 +model.width=??? seed=-1 trainer.precision=bf16 trainer.gpus=abc backend.timeout=soon "
    "+callbacks._target_=a.B +data.grain=x backend.name=ncll": [
        "The configuration has 10 mistakes",
        "optimizer is missing.",
        "trainer.gpsu=2: there is no such key. Did you mean trainer.gpus=2?",
        "model.width=VALUE",
        "seed=-1: must be a whole number",
        "Type trainer.precision=bf16-mixed",
        "trainer.gpus=abc: must be a whole number at least 0, or auto",
        "must be a time such as 90s, 30m, 2h or 1d",
        "callbacks._target_=a.B: must be a mapping with `_target_`",
        "data has datasets, ",
        "Did you mean backend.name=nccl?",
    ],
    # What doesn't fit the machine
    "recipe=toy trainer.gpus=9": ["this machine has 8 GPUs.\nUse trainer.gpus=8 or trainer.gpus=auto."],
    # Runs to begin with
    "resume=nowhere": ["resume=nowhere: there is no such directory."],
    "job=eval checkpoint.path=nowhere": ["There is no checkpoint at nowhere.\nName a run, outputs/RECIPE/RUN"],
    # Sweeps: before the first job starts
    "-m recipe=toy trainer.gpus=0,99": ["trainer.gpus=99, but this machine has"],
}
RARELY_WRONG: dict[str, list[str]] = {
    "recipe=": ["Options: blank, cartpole, digits, "],
    "'recipe=toy optimizer={lr:0.1}'": ["Each override is a word of its own: recipe=toy 'optimizer={lr:0.1}'"],
    "optimizer.lr='${nope}'": ["optimizer.lr: Interpolation key 'nope' not found"],
    "--config-name nope": ["Cannot find primary config 'nope'."],
    "--cfg job recipe=digts": ["Did you mean recipe=digits?"],
    "--cfg job -m seed=1,2": ["Leave one of them out."],
    "recipe=toy trainer.gpus=0 launcher=external": ["this process isn't one of several"],
    "recipe=toy trainer.gpus=0 init_from=nowhere": ["There is no checkpoint at nowhere"],
    "recipe=toy trainer.gpus=0 init_from=/": ["init_from also takes a folder with model.safetensors or pytorch_model"],
    "recipe=toy trainer.gpus=0 init_from=/bin/sh": ["a file of weights ends with .safetensors, .pt, .pth, .bin"],
    "recipe=toy 'init.skip=[\"(a\"]' init.rename=[a]": ['init.rename=["a"]: must be a mapping from text to text'],
    "recipe=toy 'init.skip=[\"(a\"]'": ["init.skip: '(a' isn't a regular expression: missing )"],
    "job=tune -m recipe=toy,digits": ["job=tune can't go with a sweep"],
    "-m seed=1,-2": ["seed=-2: must be a whole number at least 0"],
    "-m recipe=toy 'optimizer.lr=range(1,1)'": ["The sweep has no trials"],
    "-m optimizer=sgd,admm": ["optimizer=admm: optimizer has no such option. Did you mean optimizer=adam?"],
    "-m recipe=toy launcher=local,in_process topology.procs_per_node=2": ["launcher=in_process runs one process"],
    "-m recipe=toy trainer.gpus=0 init_from=null,nowhere": ["nowhere"],
    "-m resume=a,b": ["must be one run directory"],
}
ANSWERS = {
    "--help": ["recipe: blank, cartpole, digits, finetune_digits, gan_digits", "python -m framework recipe=toy"],
    "--cfg job --resolve recipe=toy": ["recipe: toy", "lr: 0.001"],
    "--version": [f"framework {metadata.version('framework')} (Python {platform.python_version()}, torch "],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return run_all([*WRONG, *ANSWERS], tmp_path_factory.mktemp("empty"))


@pytest.mark.exhaustive
def test_further_wrong_requests_are_answered_without_torch(tmp_path: Path) -> None:
    for command, answer in run_all([*RARELY_WRONG], tmp_path).items():
        assert_refused(answer, RARELY_WRONG[command])


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_request_is_answered_without_torch(answers: dict[str, Answer], command: str) -> None:
    assert_refused(answers[command], WRONG[command])


@pytest.mark.parametrize("command", ANSWERS)
def test_a_question_is_answered_without_torch(answers: dict[str, Answer], command: str) -> None:
    answer = answers[command]
    assert (answer.status, answer.err, answer.left) == (0, "", [])
    assert [fact for fact in ANSWERS[command] if fact not in answer.out] == []
    assert not {"hydra:", "powered by Hydra"} & set(answer.out.splitlines())


# What a job is handed


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
    monkeypatch.setattr(Train, "run", lambda _, request: JobResult(act(request)))
    monkeypatch.setattr(Train, "check", lambda *_: None)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said about a command that is wrong."""
    assert compose.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_a_job_gets_the_config_and_returns_status(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_server: Any = object()
    typed = ("recipe=toy", "trainer.gpus=0", "+optimizer.maximize=true", "preflight.seconds=3", "preflight=true")
    assert compose.main([*typed, "hydra.sweeper.max_batch_size=1"], fork_server=fork_server) == 0
    (request,) = requests
    assert (request.config.recipe, request.config.trainer.gpus) == ("toy", 0)
    assert isinstance(request.config.optimizer, dict)
    assert request.config.optimizer["maximize"] is True
    assert (request.config.preflight.enabled, request.config.preflight.seconds) == (True, 3.0)
    assert request.raw["trainer"]["gpus"] == 0
    assert request.overrides == (*typed[:4], "preflight.enabled=true")
    assert request.fork_server is fork_server
    ends: list[int | Exception] = [75, RunError("the run failed"), ZeroDivisionError("unexpected")]

    def end(_: Request) -> int:
        found = ends.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    job_that(end, monkeypatch)
    assert compose.main([]) == 75
    assert compose.main([]) == 1
    assert capsys.readouterr().err == "the run failed\n"
    with pytest.raises(ZeroDivisionError, match="unexpected"):
        compose.main([])


TOY = """# @package _global_
defaults:
  - override /model: toy
  - override /data: toy
  - override /task: regression
"""


@pytest.fixture
def own(requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a file of the folder `conf` of the working directory."""
    place = tmp_path / "own"
    place.mkdir()
    monkeypatch.chdir(place)

    def write(name: str, content: str) -> Path:
        file = place / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return file

    return write


Own = Callable[[str, str], Path]


def test_own_options_come_before_the_frameworks(requests: list[Request], own: Own, tmp_path: Path) -> None:
    own("recipe/mine.yaml", f"{TOY}  - override /optimizer: adam\nseed: 7\npreflight: {{enabled: true, seconds: 5}}\n")
    settings = "enabled: true\nmonitor: val/loss\nmode: max\nsave_top_k: 2\nevery_n_steps: 5\nevery_n_epochs: null\n"
    own("checkpoint/default.yaml", settings)
    assert compose.main(["recipe=mine", "preflight=false"]) == 0
    config = requests[0].config
    assert (config.recipe, config.seed, config.optimizer["_target_"]) == ("mine", 7, "torch.optim.Adam")
    assert (config.checkpoint.save_top_k, config.checkpoint.mode) == (2, "max")
    assert (config.preflight.enabled, config.preflight.seconds) == (False, 5.0)
    assert str(tmp_path / "own") in sys.path


def test_a_text_from_the_environment_becomes_a_number(
    requests: list[Request], own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (
        "seed: ${oc.env:SEED,3}\n"
        "tags: ['${oc.env:SEED,3}']\n"
        "trainer: {max_steps: '${oc.env:STEPS,9}', deterministic: '${oc.env:EXACT,true}'}\n"
        "data: {datasets: {num_samples: '${trainer.max_steps}'}}\n"
    )
    own("recipe/mine.yaml", TOY + texts)
    monkeypatch.setenv("STEPS", "12")
    assert compose.main(["recipe=mine"]) == 0
    config = requests[0].config
    assert (config.seed, config.trainer.max_steps, config.trainer.deterministic) == (3, 12, True)
    assert (config.tags, config.data.datasets["num_samples"]) == (("3",), 12)
    assert requests[0].raw["seed"] == 3


def test_a_sweep_over_all_options_of_a_pattern(requests: list[Request], capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.main(["-m", "job=plan", "recipe=toy", "trainer.gpus=0", "optimizer=glob(sgd*,exclude=[*_h*])"]) == 0
    assert "optimizer=sgd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "at_a_time"),
    [
        (["trainer.gpus=2"], "2, each on 1 core and 2 GPUs"),
        (["trainer.gpus=1", "sweep.share_gpus=2"], "3, each on 1 core and 1 GPU"),
        (["trainer.gpus=8"], "unknown: the GPUs aren't on this machine"),
    ],
    ids=["all", "shared", "too few"],
)
def test_a_planned_sweep_knows_the_gpus_of_the_machine(
    arguments: list[str], at_a_time: str, requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gpus = [Gpu(f"GPU {index}", f"GPU-{index}") for index in range(4)]
    for module in (hardware_module, slots_module):
        monkeypatch.setattr(module, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(slots_module, "own_cores", lambda: {0, 1, 2})
    monkeypatch.setattr(slots_module, "cpu_count", lambda: 3)
    assert compose.main(["-m", "job=plan", "recipe=toy", "seed=1,2,3", *arguments]) == 0
    assert f"at a time    {at_a_time}\n" in capsys.readouterr().out


PACKAGE = "The first line of a recipe's file must be `# @package _global_`"


EX = pytest.mark.exhaustive


class OwnFile(NamedTuple):
    """A mistake in a file of the user's own, in `conf/`."""

    file: str
    content: str
    says: str
    typed: str = "recipe=mine"


@pytest.mark.parametrize(
    "case",
    [
        OwnFile(
            file="recipe/mine.yaml",
            content=f"{TOY}trainer:\n  gpus: [1\n",
            says="mine.yaml, line 8, column 1 is not valid",
        ),
        OwnFile(file="recipe/mine.yaml", content="# Mine.\ntrainer:\n  max_epochs: 3\n", says=PACKAGE),
        OwnFile(file="config.yaml", content="recipe: some\n", typed="", says="config.yaml was used instead"),
        pytest.param(
            OwnFile(
                file="recipe/mine.yaml",
                content=f"{TOY}  - override /optimizer: addam\n",
                says="There is no optimizer/addam.yaml, which a file refers to. Did you mean adam?",
            ),
            marks=EX,
        ),
        pytest.param(
            OwnFile(file="recipe/mine.yaml", content=f"{TOY}resume: somewhere\n", says="Type it on the command line"),
            marks=EX,
        ),
        pytest.param(OwnFile(file="recipe/mine.yaml", content=TOY.partition("\n")[2], says=PACKAGE), marks=EX),
    ],
)
def test_mistakes_in_own_files(own: Own, capsys: pytest.CaptureFixture[str], case: OwnFile) -> None:
    own(case.file, case.content)
    assert case.says in refused(capsys, *case.typed.split())


# Resuming: the configuration differs in ways that today's `conf/` and what is typed don't say

STARTED = ("recipe=toy", "optimizer.lr=0.5", "trainer.max_epochs=4", "callbacks=ema")


@pytest.fixture
def run_dir(requests: list[Request], tmp_path: Path) -> RunDir:
    raw = composed(*STARTED)
    raw["data"]["batch_size"] = 77
    run_dir = create_run_dir(tmp_path / "outputs" / "a (b), c=d")
    save_config(run_dir, raw=raw, overrides=STARTED)
    return run_dir


def test_typed_overrides_are_kept_when_resuming(requests: list[Request], run_dir: RunDir) -> None:
    typed = ("trainer.max_epochs=9", "+optimizer.maximize=true", "~callbacks.ema", "optimizer=adam")
    assert compose.main([*typed, f"resume={run_dir.path}", "trust=true"]) == 0
    request = requests.pop()
    assert request.config.trainer.max_epochs == 9
    assert isinstance(request.config.optimizer, dict)
    assert request.config.optimizer["maximize"] is True
    assert request.config.callbacks == {}
    assert (request.config.optimizer["_target_"], request.config.optimizer["lr"]) == ("torch.optim.Adam", 0.001)
    assert request.config.data.batch_size == 77
    assert "trainer.max_epochs=9" in request.overrides
    assert not {"trainer.max_epochs=4", "optimizer.lr=0.5"} & set(request.overrides)
    save_config(run_dir, raw=request.raw, overrides=request.overrides)
    run_dir.checkpoints.mkdir()
    assert compose.main([f"resume={run_dir.checkpoints}", "trust=true"]) == 0
    assert requests[0].raw == {**request.raw, "resume": str(run_dir.path)}
    assert requests[0].overrides == request.overrides


def test_a_run_outlives_its_recipe(
    requests: list[Request], run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.overrides_file.write_text("[recipe=mine, seed=3]")
    run_dir.config_file.write_text(run_dir.config_file.read_text().replace("recipe: toy", "recipe: mine"))
    assert compose.main([f"resume={run_dir.path}", "trainer.max_epochs=9", "trust=true"]) == 0
    assert requests[0].raw["trainer"]["max_epochs"] == 9
    assert requests[0].raw["recipe"] == "mine"
    assert requests[0].overrides == ("recipe=mine", "seed=3", "trainer.max_epochs=9")
    assert "Only config.yaml of" in capsys.readouterr().err
    printed = refused(capsys, f"resume={run_dir.path}", "optimizer=none_such", "trust=true")
    for fact in ("optimizer=none_such", "recipe=mine seed=3", "the folder it was started from"):
        assert fact in printed
    assert len(requests) == 1
