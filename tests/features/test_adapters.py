"""Adapters of peft, and checkpoints that hold only what was trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.optim import SGD

import framework
from recipes.toy import ToyModel
from tests.features.test_pretrained import GPT2, procs
from tests.helpers import guards, results
from tests.helpers.internals import compose
from tests.helpers.loops import toy_batches, toy_model
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

Run = Callable[..., Path]
STEPS = 6
TOY = (
    "recipe=toy",
    "logger=jsonl",
    "optimizer.lr=0.01",
    "data.global_batch_size=20",
    f"trainer.max_steps={STEPS}",
    f"trainer.val_check_interval={STEPS}",
)
LORA = ("peft=lora", "peft.r=2", "peft.target_modules=[net1,net2]")
SMALL = "checkpoint.only_trained=true"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretrained weights of the toy model."""
    file = tmp_path_factory.mktemp("base") / "base.pt"
    torch.save(base_weights(), file)
    return file


def base_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        return toy_model(seed=7).state_dict()


@pytest.fixture(scope="module")
def adapted(shared_run: Run, base: Path) -> Path:
    return shared_run(*TOY, *LORA, SMALL, f"init_from={base}")


def plain_lora() -> nn.Module:
    """The same training as a plain loop."""
    with torch.random.fork_rng(devices=[]):
        model = toy_model()
        model.load_state_dict(base_weights())
        adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=16, target_modules=["net1", "net2"]))
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = SGD(trained, lr=0.01)
        for inputs, targets in toy_batches(epochs=1, batches=STEPS):
            nn.functional.mse_loss(adapted(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return adapted


def test_lora_trains_as_a_plain_loop_does(adapted):
    """Its checkpoint holds the adapters alone, which are a few of the model's tensors."""
    wanted = {name: tensor for name, tensor in plain_lora().state_dict().items() if "lora" in name}
    assert len(wanted) == 4
    results.assert_same(results.weights(adapted), wanted)


def test_the_number_of_processes_does_not_matter(train, adapted, base):
    again = train(*TOY, *LORA, SMALL, f"init_from={base}", procs(2))
    results.assert_same(results.weights(again), results.weights(adapted), tolerance=1e-6)


def test_a_small_checkpoint_is_evaluated_and_exported(train, adapted, fork_server, tmp_path, monkeypatch):
    """The frozen weights are built again. Merged, they are those of the plain model."""
    evaluated = train("job=eval", "eval.part=val", f"checkpoint.path={adapted}", "path.outputs=outputs", procs(2))
    wanted = results.results(adapted)["last"]["metrics"]["val/loss"]
    assert results.metrics(evaluated)["val/loss"] == pytest.approx(wanted, rel=1e-6)

    export(fork_server, adapted, "export.merge=true", "export.output=merged.pt")
    model = ToyModel()
    model.load_state_dict(torch.load("merged.pt", weights_only=True))
    inputs = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(inputs), plain_lora()(inputs))
    last = framework.load(adapted, trust=True).last_model()
    torch.testing.assert_close(last(inputs), model(inputs))


def test_a_small_checkpoint_resumes_exactly(train, adapted, base, capfd):
    """If the frozen weights aren't what the run began with, that is refused and nothing changes."""
    begun = (*TOY, *LORA, SMALL, "scheduler.total_steps=6", f"init_from={base}")
    stopped = train(*begun, "trainer.max_steps=3", "trainer.limit_val_batches=0", "checkpoint.monitor=null")
    kept = base.read_bytes()
    try:
        torch.save(ToyModel().state_dict(), base)
        capfd.readouterr()
        train(f"resume={stopped}", f"trainer.max_steps={STEPS}", status=2)
        said = capfd.readouterr().err
        assert "holds only what was trained" in said
        assert "4 of the 4 frozen tensors, such as base_model.model.net1.base_layer.weight, aren't built here" in said
    finally:
        base.write_bytes(kept)
    resumed = train(f"resume={stopped}", f"trainer.max_steps={STEPS}")
    results.assert_same(results.weights(resumed), results.weights(adapted))


def test_a_frozen_backbone_is_left_out_until_it_is_trained(train):
    """The best checkpoint is from before the backbone was unfrozen: it is tested with the weights of that time."""
    begun = (
        *TOY,
        "trainer.max_steps=null",
        "trainer.max_epochs=3",
        "trainer.val_check_interval=null",
        "+model.freeze=['^net1']",
        "+callbacks.unfreeze={_target_:framework.callbacks.Unfreeze,params:['^net1'],at_epoch:1}",
        # The loss falls, so that the first epoch is the best.
        "checkpoint.mode=max",
        procs(2),
    )
    small = train(*begun, SMALL)
    whole = train(*begun)
    assert results.pointed(small, "best") == results.pointed(whole, "best") == 80
    assert set(results.weights(small, "best")) == {"net2.weight", "net2.bias"}
    results.assert_same(results.weights(small), results.weights(whole))
    assert results.results(small)["test"] == results.results(whole)["test"]


def test_frozen_weights_that_change_are_saved(train):
    """A resumed run would lose them otherwise."""
    drift = "+callbacks.drift._target_=tests.features.adapter_cases.Drift"
    run = train(*TOY, SMALL, "+model.freeze=['^net1']", drift)
    assert set(results.weights(run)) == {"net1.bias", "net2.weight", "net2.bias"}


def test_what_the_task_trains_is_trained_beside_adapters(train):
    task = ("task._target_=tests.features.adapter_cases.Scaled", "~task.loss", "~task.metrics")
    run = train(*TOY, *LORA, SMALL, *task, procs(2))
    weights = results.weights(run)
    scales = [tensor for name, tensor in weights.items() if "lora" not in name]
    assert len(weights) == 5
    assert scales[0] != 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            (*LORA, "peft.target_modules=[net1,net3]"),
            "peft.target_modules: no module of ToyModel is named net3.\nIts linear modules are: net1, net2.",
        ),
        (("peft=lora",), "Its linear modules are: net1, net2."),
        ((*LORA, "peft.rank=2"), "peft.rank"),
        ((*LORA, "strategy=pipeline", procs(2)), "peft can't go with strategy=pipeline"),
        ((SMALL, "strategy=fsdp", procs(2)), "checkpoint.only_trained=true can't go with strategy=fsdp"),
    ],
    ids=["unknown name", "no name", "unknown keyword", "pipeline", "fsdp"],
)
def test_what_cannot_be_is_refused(train, capfd, asked, said):
    train(*TOY, *asked, status=2)
    assert said in capfd.readouterr().err


def test_a_missing_package_is_named(train, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    train(*TOY, *LORA, status=2)
    assert "peft needs the package peft, which isn't installed: pip install peft" in capfd.readouterr().err


@pytest.fixture(scope="module")
def gpt2(shared_run: Run) -> Path:
    return shared_run(*GPT2, "peft=lora", "peft.target_modules=[c_attn]", "trainer.max_epochs=1", procs(2))


# Peft 0.21 reads what transformers 5 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_adapters_and_merged_models_are_read_by_from_pretrained(gpt2, fork_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(fork_server, gpt2, "export.format=pretrained", "export.output=adapter")
    export(fork_server, gpt2, "export.format=pretrained", "export.merge=true", "export.output=merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")

    # The base as the run has it, in a checkpoint of all weights.
    weights = results.weights(gpt2)
    base = transformers.AutoModelForCausalLM.from_config(merged.config)
    names = {name: f"base_model.model.{name}".replace("c_attn", "c_attn.base_layer") for name in base.state_dict()}
    base.load_state_dict({name: weights[saved] for name, saved in names.items()})
    adapted = PeftModel.from_pretrained(base, "adapter").eval()
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
        with adapted.disable_adapter():
            assert not torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-4)


def test_fsdp_trains_adapters_as_ddp_does(train, gpt2):
    sharded = train(
        *GPT2, "peft=lora", "peft.target_modules=[c_attn]", "trainer.max_epochs=1", "strategy=fsdp", procs(2)
    )
    results.assert_same(results.weights(sharded), results.weights(gpt2), tolerance=1e-6)


def export(fork_server, run: Path, *asked: str) -> None:
    with guards.no_leaks(owns_state=True):
        overrides = trusting(("job=export", f"checkpoint.path={run}", *asked))
        assert compose.main(overrides, fork_server=fork_server) == 0
