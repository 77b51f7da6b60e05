"""What the command answers to names of other tools, to habits of other commands, and to mistakes in own files.

It names the exact correction. All mistakes of a command are reported at once, so one command has many here.
"""

from __future__ import annotations

import re
import shlex

import pytest

from tests.helpers.answers import Answer, run_all
from tests.helpers.internals import ADVICE, known_keys
from tests.unit.config.raw import composed

NAMES = {
    # Lightning
    "trainer.devices=2": "Type trainer.gpus=2 for 2 GPUs of each machine, or trainer.gpus=0 topology.procs_per_node=2 ",
    "trainer.accelerator=cpu": "Type trainer.gpus=0",
    "trainer.num_nodes=3": "Type topology.nnodes=3",
    "trainer.strategy=fsdp": "Did you mean strategy=fsdp?",
    "trainer.resume_from_checkpoint=x": "Type resume=RUN with the run's directory",
    "ckpt_path=x": "to evaluate, type job=eval checkpoint.path=x",
    "trainer.logger=false": "Type logger=none",
    "strategy=ddp_spawn": "Type strategy=ddp",
    "callbacks=[model_checkpoint]": "type checkpoint.monitor=val/loss",
    # transformers and Accelerate
    "learning_rate=0.2": "Type optimizer.lr=0.2",
    "optimizer.learning_rate=0.1": "Type optimizer.lr=0.1",
    "num_train_epochs=4": "Type trainer.max_epochs=4",
    "per_device_train_batch_size=8": "Type data.batch_size=8",
    "gradient_accumulation_steps=2": "Type trainer.accumulate_grad_batches=2",
    "mixed_precision=bf16": "Type trainer.precision=bf16-mixed",
    # torchrun, the environment, and what others call it
    "nproc_per_node=2": "Type topology.procs_per_node=2",
    "backend.port=29500": "On several, type topology.rdzv_endpoint=HOST:PORT",
    "CUDA_VISIBLE_DEVICES=1": "CUDA_VISIBLE_DEVICES=1 python -m framework",
    "lr=0.3": "Did you mean optimizer.lr=0.3?",
    "batch_size=16": "Did you mean data.batch_size=16?",
    "optimizer=rmsprop": "type ~optimizer '+optimizer={_target_:torch.optim.RMSprop,lr:0.001}'",
    "recipe=conf/recipe/toy.yaml": "Did you mean recipe=toy?",
    "recipe=resnet": "One of your own is a file conf/recipe/resnet.yaml in this folder.",
    # Forms
    "trainer={devices:2}": "there is no key devices in trainer. Type trainer.gpus=2",
    "data={_target_:own.data}": "Type data.datasets={_target_:own.data}",
    "optimizer={_target_:own.SAM,closure:true}": "which has no closure. To replace it, type ~optimizer '+optimizer={_t",
    "peft.r=4": "no option of peft is chosen. Choose one first: peft=lora",
    "+backend=gloo": "an option of backend is chosen already. Type backend=gloo in its place.",
    "+callbacks=ema": "Type callbacks=ema in its place, or +callbacks=[ema] to add one.",
    "optimizer.lr=interval(0.1,1)": "Add -m sweep=optuna sweep.n_trials=20",
    "data.num_workers=0,05": "Add -m, or type data.num_workers=0.05",
    "recipe==toy": "Type recipe=toy",
    "optimizer.lr =0.1": "Type optimizer.lr=0.1",
    "name=\udcff": "It isn't UTF-8 text.",
    "optimizer.betas=(0.9,0.99)": "A list has square brackets: 'optimizer.betas=[0.9,0.99]'",
    "seed=“3”": "Quotes are straight: seed=3",
    "model=torchvision.models.resnet18": "type ~model '+model={_target_:torchvision.models.resnet18}'",
    "callbacks=[early_stopping ema]": "Type callbacks=[early_stopping,ema]",
    "logger=jsonl,console": "or type 'logger=[jsonl,console]' for all of them in one run.",
}
"""Overrides of one command."""

WORDS = {
    "trainer.max_epochs = 3": "Type trainer.max_epochs=3",
    "trainer.max_steps= 4": "Type trainer.max_steps=4",
    "seed =5": "Type seed=5",
    "recipe mnist": "Type recipe=mnist",
    "train": "Leave it out, or type job=train",
    "job:plan": "Type job=plan",
    "trainer.gpus: 1": "Type trainer.gpus=1",
    "callbacks=[early_stopping, ema]": "Type callbacks=[early_stopping,ema]",
    "tags=[baseline big]": "Type tags=[baseline,big]",
    "--task regression": "Type task=regression",
    "--nproc_per_node=2": "Type topology.procs_per_node=2",
    "--lr 0.1": "Did you mean optimizer.lr=0.1?",
    "--cpu": "Type trainer.gpus=0",
    "--resume": "Type resume=auto",
    "--config mine.yaml": "type recipe=NAME for conf/recipe/NAME.yaml",
}
"""Parts of one command."""

VALUES = {
    "trainer.gpus=-1": "Type trainer.gpus=auto",
    "data.root=None": "Type data.root=null",
    "trainer.max_epochs='\"3\"'": "Here it is a text: write it without quotes.",
    "trainer.precision=16": "Type trainer.precision=16-mixed",
    "data.shuffle=no": "Write data.shuffle=false.",
    "data.batch_size=32.0": "Write data.batch_size=32.",
    "job=validate": "Type job=eval eval.part=val checkpoint.path=RUN",
    "+trainer.devices=[0,1]": "CUDA_VISIBLE_DEVICES=0,1 python -m framework",
    "+data._target_=own.data": "Type data.datasets={_target_:own.data}",
}
"""Overrides of one command that Hydra composes."""

ALONE = {
    "--config-name=toy": "Type recipe=toy in place of --config-name.",
    "resume=true": "Type resume=auto",
    "recipe=toy hydra.run.dir=x": "hydra.run.dir=x has no effect here. Type path.outputs=x",
    "recipe=toy hydra.job.chdir=true hydra.verbose=true": "hydra.job.chdir=true has no effect here.",
    "recipe=forgotten": "conf/recipe/forgotten.yaml: an option of task is chosen already",
    "recipe=forgotten_override": "    - override /task: regression",
    "recipe=forgotten_slash": "    - override /task: regression",
    "recipe=forgotten_alone": "    - override /task: regression",
    "recipe=forgotten_both": "conf/recipe/forgotten_both.yaml: an option of task is chosen already",
    "recipe=wrong_group": "has `override` for taks, which is no group. Did you mean task?",
    "recipe=list": "conf/recipe/list.yaml: callbacks is a list, and must be a mapping.",
    "recipe=short": "model=recipes.toy.ToyModel: must be a mapping with `_target_`. Write model: ",
    "recipe=unindented": "Indent it below its section",
    "recipe=no_package": "The first line of a recipe's file must be `# @package _global_`.",
    "recipe=own_dir": "hydra.run.dir=runs/${now:%Y} has no effect here.",
    "recipe=own_parts scheduler=none": "the recipe sets scheduler.schedule itself, to framework.optim.cosine. Type "
    "scheduler.schedule=null",
    "recipe=own_parts scheduler=step": "scheduler=step has no effect: the recipe sets scheduler.schedule itself",
    "recipe=own_parts model=cnn": "model=cnn has no effect: the recipe sets model._target_ itself, to recipes.toy",
    "recipe=own_parts callbacks=none": "callbacks=none has no effect: the recipe sets callbacks.ema itself",
    "-m recipe=own_parts scheduler=none,cosine": "scheduler=none has no effect",
    "recipe=devices": "trainer.devices=2: there is no such key. Type trainer.gpus=2",
}
"""Commands."""

RECIPE = """# @package _global_
defaults:
  - override /model: toy
  - override /data: toy
  - {task}
"""
FILES = {
    "forgotten": RECIPE.format(task="task: regression"),
    "forgotten_override": RECIPE.format(task="/task: regression"),
    "forgotten_slash": RECIPE.format(task="override task: regression"),
    "forgotten_alone": "# @package _global_\ndefaults:\n  - /task: regression\n",
    "forgotten_both": "# @package _global_\ndefaults:\n  - task: regression\n",
    "wrong_group": RECIPE.format(task="override /taks: regression"),
    "list": RECIPE.format(task="override /task: regression") + "callbacks: [early_stopping]\n",
    "no_package": "trainer: {max_epochs: 3}\n",
    "short": RECIPE.format(task="override /task: regression") + "model: recipes.toy.ToyModel\n",
    "unindented": RECIPE.format(task="override /task: regression") + "model:\n_target_: recipes.toy.ToyModel\n",
    "own_dir": RECIPE.format(task="override /task: regression") + "hydra: {run: {dir: 'runs/${now:%Y}'}}\n",
    "own_parts": RECIPE.format(task="override /task: regression")
    + "model: {_target_: recipes.toy.ToyModel}\nscheduler: {schedule: {_target_: framework.optim.cosine}}\n"
    + "callbacks: {ema: {_target_: framework.callbacks.EMAWeightAveraging}}\n",
    "devices": RECIPE.format(task="override /task: regression") + "trainer: {devices: 2}\n",
}
"""Recipes by name."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("own")
    recipes = folder / "conf/recipe"
    recipes.mkdir(parents=True)
    for name, text in FILES.items():
        (recipes / f"{name}.yaml").write_text(text)
    commands = {
        "names": shlex.join(NAMES),
        "words": " ".join(WORDS),
        "values": " ".join(VALUES),
        **{command: f"{command} job=plan" for command in ALONE},
    }
    found = run_all(list(commands.values()), folder)
    return {name: found[command] for name, command in commands.items()}


def assert_answered(answer: Answer, mistake: str, advice: str) -> None:
    assert (answer.status, answer.out) == (2, ""), answer.err
    assert "Traceback" not in answer.err
    lines = [line for line in answer.err.splitlines() if mistake in line and advice in line]
    assert lines, answer.err


@pytest.mark.parametrize("override", NAMES)
def test_a_name_of_another_tool_gets_ours(answers: dict[str, Answer], override: str) -> None:
    assert_answered(answers["names"], override.partition("=")[0], NAMES[override])


@pytest.mark.parametrize("words", WORDS)
def test_words_that_are_no_override(answers: dict[str, Answer], words: str) -> None:
    assert_answered(answers["words"], words, WORDS[words])


@pytest.mark.parametrize("override", VALUES)
def test_a_wrong_value_gets_a_right_one(answers: dict[str, Answer], override: str) -> None:
    assert_answered(answers["values"], override.lstrip("+").partition("=")[0], VALUES[override])


@pytest.mark.parametrize("command", ALONE)
def test_a_wrong_command_or_file_gets_a_right_one(answers: dict[str, Answer], command: str) -> None:
    assert_answered(answers[command], "", ALONE[command])


def test_advice_names_keys_that_exist() -> None:
    keys = {*known_keys(composed("recipe=toy", "optimizer=adam", "callbacks=[early_stopping,ema]"))}
    keys |= {*known_keys(composed("recipe=toy", "scheduler=warmup_cosine", "strategy=ddp"))}
    wrong = []
    for name, text in ADVICE.items():
        typed = re.findall(r"(?<![-\w./{:])\+?((?:[a-z_]+\.)*[a-z_]+)=", text)
        wrong += [(name, key) for key in typed if key not in keys and key != "task.loss.label_smoothing"]
    assert wrong == []


def test_no_advice_is_for_a_key_that_exists() -> None:
    assert {*ADVICE} & {*known_keys()} == set()
