"""Commands of the documentation are run, each override that they show at least once.

Every command is composed and checked by tests/shape/test_docs.py; that is all for those that need GPUs, several nodes
or a sweep on disk (tests/features/test_sweeps.py), for those that only plan or answer, and for those whose option or
key a test of its own trains with. Of the sweeps, the README's runs; docs/AGENTS.md is followed by test_agents_page.py.
Trainings are cut to a few steps.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.documents import ONLY_ANSWERS, Command, all_commands, covering, write_shown_files
from tests.helpers.internals import ForkServer, compose
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

SHORT = {
    "train": ("trainer.max_epochs=1", *(f"trainer.limit_{part}_batches=1" for part in ("train", "val", "test"))),
    "parity": ("parity.steps=1",),
    "preflight": ("preflight.seconds=0.1", "preflight.max_bytes=4096"),
    "tune": ("tune.max_batch_size=16",),
}
"""By job, what makes it short."""
NOT_HERE = re.compile(
    r".*=SWEEP(,.*)?|job=(plan|submit|upload)|trainer\.gpus=[1-9]\d*|topology=multi_node|topology\.nnodes=.*"
    # These need a run with that step, or one that went wrong.
    r"|step=\d+|job=why|data\.datasets\.broken=nan|data\.skip_steps=.*"
    # These need files that an earlier command writes, or print warnings of peft; they have tests of their own.
    r"|recipe=gpt_tokens|task\.weights=.*|job=recipes\.ddpm_sample\.sample|peft=lora"
    r"|export\.format=lightning|init\.training=true|init_from=(initial\.pt|digits\.ckpt)"
)
HAS_OWN_TEST = re.compile(
    # In tests/parity and tests/features/test_spread_models.py.
    r"strategy=(fsdp|hsdp|butterfly)|strategy\.warmup_steps=.*"
    # In tests/features, by the names of its files.
    r"|logger\.(wandb|mlflow|tensorboard)\..*|callbacks=\[nan_guard\]|callbacks\.(spike_guard|swa|profiler)\..*"
    r"|optimizer\.layer_decay=.*|tune\.find_batch_size=.*|export\.format=torch_export|trainer\.profiler=.*|format=json"
    # In test_agents_page.py.
    r"|resume=auto"
)
LEFT_OUT = re.compile(r"(data\.root|data\.mirrors|path\.outputs|preflight\.(min|max)_\w+)=.*")
"""Places that don't exist here, and speeds that a machine needn't have to run tests."""
A_RUN = re.compile(r"(?<=[=\[,])(outputs/\w+/)?(RUN|\.\.\.|\$run)")

Answer = Callable[..., int]


def chosen() -> list[Command]:
    possible = []
    for command in all_commands():
        only_answers = (ONLY_ANSWERS | {"…"}) & set(command.arguments)
        if only_answers or any(NOT_HERE.fullmatch(text) or HAS_OWN_TEST.fullmatch(text) for text in command.arguments):
            continue
        if command.place == "AGENTS.md" or ("-m" in command.arguments and command.place != "README.md"):
            continue
        arguments = [text for text in command.arguments if not LEFT_OUT.fullmatch(text)]
        possible.append(command._replace(arguments=arguments))
    return covering(possible, options=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as of a reader who has made the files that the documentation shows, and their data."""
    made = tmp_path_factory.mktemp("reader")
    write_shown_files(made)
    for name in ("a.txt", "b.txt", "c.txt"):
        (made / name).write_text("0 1 2 3 4 5 6 7 8 9 0 1 2 3 4\n" * 40)
    return made


@pytest.fixture
def answer(fork_server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return lambda *arguments: compose.main(arguments, fork_server=fork_server)


@pytest.fixture
def run_of(answer: Answer, folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a copy of a recipe's run that was ended after two steps: `outputs/digits/...`, `RUN`."""

    def copy(recipe: str) -> Path:
        if not (folder / "ended" / recipe).exists():
            short = ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.max_steps=2", "scheduler=none")
            limits = ("trainer.val_check_interval=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
            assert answer(f"recipe={recipe}", "path.outputs=ended", "trainer.gpus=0", *short, *limits) == 0
        # Evaluations lie there, too.
        first = min(folder.glob(f"ended/{recipe}/*"))
        return Path(shutil.copytree(first, tmp_path / "run", symlinks=True))

    return copy


@pytest.mark.exhaustive
# launcher=in_process trains in this process.
@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(
    "command",
    chosen(),
    ids=lambda command: command.text,
)
def test_a_documented_command_runs(command: Command, answer: Answer, request: pytest.FixtureRequest) -> None:
    if "export.format=onnx" in command.arguments and not importlib.util.find_spec("onnxscript"):
        pytest.skip("onnxscript isn't installed")
    typed = trusting(_short(command, request))
    capture = request.config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()
    status = answer(*typed)
    # Include the ranks, whose server is older than any `capfd`.
    printed = "".join(capture.read_global_capture())
    assert status == 0, printed
    assert "Warning" not in printed


def _short(command: Command, request: pytest.FixtureRequest) -> list[str]:
    """Return the overrides with a run and the data of this machine, and few steps."""
    arguments = list(command.arguments)
    if any(A_RUN.search(text) or "CHECKPOINT" in text for text in arguments):
        # Other recipes' commands are run with a run of digits.
        recipe = "digits"
        for name in ("majority", "gpt_char"):
            if any(f"outputs/{name}/" in text for text in arguments):
                recipe = name
        run = str(request.getfixturevalue("run_of")(recipe))
        arguments = [A_RUN.sub(run, text).replace("=CHECKPOINT", f"={run}") for text in arguments]
        arguments = [text.replace("CHECKPOINT", "last") for text in arguments]
        if any(f"{run},{run}" in text for text in arguments):
            # A run that is named twice counts once.
            other = shutil.copytree(run, f"{run}_2", symlinks=True)
            arguments = [text.replace(f"{run},{run}", f"{run},{other}") for text in arguments]
    (job,) = {text.removeprefix("job=") for text in arguments if text.startswith("job=")} or {"train"}
    if any(text.startswith("recipe=mnist") for text in arguments):
        arguments.append(f"data.root={request.getfixturevalue('data_root')}")
    if any(text.startswith("recipe=gpt_") for text in arguments):
        arguments.append("scheduler.total_steps=2000")
    if not any(text.startswith("trainer.gpus=") for text in arguments):
        arguments.append("trainer.gpus=0")
    if any(text.startswith("resume=") and text != "resume=auto" for text in arguments):
        return [*arguments, "trainer.max_steps=null"]
    return [*arguments, *SHORT.get(job, ())]
