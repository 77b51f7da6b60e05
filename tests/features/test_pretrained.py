"""Models of transformers: trained from a configuration, exported as a folder, and begun with another head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.helpers import guards, results
from tests.helpers.internals import compose
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

PRELOADED = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.auto.modeling_auto")
Run = Callable[..., Path]
SHORT = (
    "recipe=toy",
    "task=transformers",
    "optimizer=adam",
    "logger=jsonl",
    "data.global_batch_size=12",
    "trainer.max_epochs=2",
    "data.datasets._target_=tests.features.pretrained_cases.texts",
    "~data.datasets.num_samples",
    "~data.datasets.seed",
)
SIZES = "vocab_size:11,n_positions:8,n_embd:32,n_layer:2,n_head:2,bos_token_id:0,eos_token_id:0"
CONFIG = f"+model.config={{_target_:transformers.GPT2Config,{SIZES}}}"
GPT2 = (*SHORT, "model._target_=transformers.AutoModelForCausalLM.from_config", CONFIG)
CLASSIFIER = (
    *SHORT,
    "model._target_=transformers.AutoModelForSequenceClassification.from_config",
    CONFIG,
    "+model.config.num_labels=3",
    "+model.config.pad_token_id=0",
    "+data.datasets.has_classes=true",
)


def procs(number: int) -> str:
    return f"topology.procs_per_node={number}"


@pytest.fixture(scope="module")
def trained(shared_run: Run) -> Path:
    return shared_run(*GPT2, procs(2))


@pytest.fixture(scope="module")
def exported(trained: Path, fork_server, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("exported") / "gpt2"
    with guards.no_leaks(owns_state=True):
        asked = ("job=export", f"checkpoint.path={trained}", "export.format=pretrained", f"export.output={folder}")
        assert compose.main(trusting(asked), fork_server=fork_server) == 0
    return folder


def test_an_exported_folder_is_read_by_from_pretrained(trained, exported, fork_server, tmp_path, monkeypatch, capfd):
    """Other users can read the folder. It is never overwritten; a model without save_pretrained has none."""
    assert {file.name for file in exported.iterdir()} >= {"config.json", "model.safetensors"}
    assert {file.name for file in exported.parent.iterdir()} == {"gpt2"}
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1
    again = transformers.AutoModelForCausalLM.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_config(again.config)
    model.load_state_dict(results.weights(trained))
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)
    monkeypatch.chdir(tmp_path)
    for run, output, said in (
        (trained, exported, "gpt2 exists already."),
        (None, tmp_path / "toy", "ToyModel has none.\nUse export.format=state_dict"),
    ):
        run = run or train_toy(fork_server, tmp_path)
        asked = ("job=export", f"checkpoint.path={run}", "export.format=pretrained", f"export.output={output}")
        assert compose.main(trusting(asked), fork_server=fork_server) == 2
        assert said in capfd.readouterr().err
    assert not (tmp_path / "toy").exists()


def train_toy(fork_server, folder: Path) -> Path:
    assert (
        compose.main(["trainer.gpus=0", "recipe=toy", "logger=none", "trainer.max_steps=1"], fork_server=fork_server)
        == 0
    )
    (run,) = folder.glob("outputs/toy/*")
    return run


@pytest.mark.parametrize(
    "spread",
    [
        (procs(2),),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ((procs(1),), (procs(3),), (procs(2), "strategy=fsdp"), (procs(3), "strategy=fsdp"))
        ),
    ],
    ids=" ".join,
)
def test_another_head_keeps_the_pretrained_body(train, exported, trained, spread):
    """The head is drawn as without it; what was loaded is said once, and the log has all names."""
    steps = ("optimizer.lr=1e-30", "trainer.max_steps=1", "trainer.limit_val_batches=0", "checkpoint.monitor=null")
    begun = train(*CLASSIFIER, *steps, *spread, f"init_from={exported}", "init.skip=[score]")
    found = results.weights(begun)
    body = results.weights(trained)
    results.assert_same({name: found[name] for name in found if name != "score.weight"}, without_head(body))
    fresh = results.weights(train(*CLASSIFIER, *steps))
    assert torch.equal(found["score.weight"], fresh["score.weight"])
    said = f"Weights of {exported}: 28 tensors loaded\n  as the model was built: score.weight\n"
    assert results.log(begun).count(said) == 1
    assert "  loaded: transformer.h.0.attn.c_attn.bias, " in results.log(begun)


def without_head(weights):
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


def test_another_head_without_a_word_is_refused_once(train, exported, capfd):
    train(*CLASSIFIER, procs(2), f"init_from={exported}", status=2)
    printed = capfd.readouterr().err
    assert printed.count("not in the file: score.weight\nUse init.rename") == 1


def test_a_resumed_run_keeps_its_own_weights(train, exported):
    """The model has dropout and trains on two processes."""
    begun = (*CLASSIFIER, procs(2), f"init_from={exported}", "init.skip=[score]")
    whole = train(*begun)
    stopped = train(*begun, "trainer.max_steps=7", "trainer.limit_val_batches=0", "checkpoint.monitor=null")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    assert results.results(whole)["steps"] == results.results(resumed)["steps"] == 10
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_from_pretrained_trains_as_init_from_does(train, exported):
    """from_pretrained returns a model in evaluation mode, in which dropout would be off."""
    begun = train(*GPT2, f"init_from={exported}", "trainer.max_epochs=1")
    target = "model._target_=transformers.AutoModelForCausalLM.from_pretrained"
    built = train(*SHORT, target, f"+model.pretrained_model_name_or_path={exported}", "trainer.max_epochs=1")
    results.assert_same(results.weights(built), results.weights(begun))


def test_predictions_are_the_scores(train, trained):
    asked = ("job=predict", f"checkpoint.path={trained}", "predict.part=val", "predict.output=scores.pt")
    train(*asked, procs(2), "path.outputs=outputs")
    assert torch.load("scores.pt", weights_only=True)["logits"].shape == (21, 8, 11)
