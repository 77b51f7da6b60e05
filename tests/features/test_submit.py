"""`job=submit`: what each engine is given, that a shell runs it as typed, and what is refused before it waits.

SLURM itself: tests/multiproc/test_slurm.py. No Kubernetes and no SkyPilot runs here: what they get is compared with the
fields that they publish, and its commands are run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

import framework
from framework.errors import ConfigError
from tests.helpers import skypilot
from tests.helpers.internals import compose, quoted, value_of

pytestmark = pytest.mark.multiproc


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Submit = Callable[..., Answer]
S3 = "path.outputs=s3://bucket/team"
IMAGE = "submit.trainjob.spec.trainer.image=registry.example/project:1"
TRAINJOB = ("submit.format=trainjob", "recipe=toy", S3, IMAGE)
SKYPILOT = ("submit.format=skypilot", "recipe=toy", S3)
ODD = """it's "50 %" of $HOME, $(id) `more`\\\nänd 東"""


@pytest.fixture
def submit(fork_server, tmp_path, monkeypatch, capfd) -> Submit:
    """The command in an empty folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*overrides: str) -> Answer:
        capfd.readouterr()
        gpus = () if any(text.startswith("trainer.gpus=") for text in overrides) else ("trainer.gpus=0",)
        status = compose.main(["job=submit", *gpus, *overrides], fork_server=fork_server)
        return Answer(status, *capfd.readouterr())

    return run


@pytest.fixture
def printed(submit: Submit) -> Callable[..., str]:
    """What is submitted, which leaves nothing in the folder."""

    def run(*overrides: str) -> str:
        answer = submit("submit.dry_run=true", *overrides)
        assert (answer.status, answer.err) == (0, "")
        assert not list(Path.cwd().iterdir())
        return answer.out

    return run


class Programs:
    """Programs of a cluster that write down what they are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, *, prints: str = "", status: int = 0) -> None:
        """A program of this name: it prints a text on stdout, or with a status on stderr."""
        stream = 2 if status else 1
        code = (
            f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
            f"given = '' if sys.stdin.isatty() else sys.stdin.read()\n"
            "files = [Path(text).read_text() for text in sys.argv[1:] if text.endswith('.yaml')]\n"
            f"with open({str(self.folder / (name + '.calls'))!r}, 'a') as file:\n"
            "    print(json.dumps([sys.argv[1:], given, files]), file=file)\n"
            f"print({prints!r}, file=open({stream}, 'w'))\nsys.exit({status})\n"
        )
        (self.folder / name).write_text(code)
        (self.folder / name).chmod(0o755)

    def calls(self, name: str) -> list[Any]:
        """The arguments, the input and the files of each call."""
        file = self.folder / f"{name}.calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def run(self, script: str, **variables: str) -> int:
        """Run a script with these programs first; return its exit status."""
        path = f"{self.folder}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **variables}
        result = subprocess.run(
            ["bash", "-c", script], env=environment, stdin=subprocess.DEVNULL, check=False, timeout=60
        )
        return result.returncode


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs(tmp_path / "programs")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def directives(script: str) -> dict[str, str]:
    """The options of sbatch in a script; one without a value has an empty one."""
    lines = re.findall(r"^#SBATCH --([^=\n]+)=?(.*)$", script, re.MULTILINE)
    return {name: value.strip('"') for name, value in lines}


# SLURM


def test_the_script_asks_for_the_planned_processes(printed):
    script = printed("submit.format=slurm", "recipe=mnist", "trainer.gpus=4", "topology.nnodes=2")
    assert directives(script) == {
        "job-name": "mnist",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "signal": "USR1@120",
        "requeue": "",
        "open-mode": "append",
    }


def test_options_of_sbatch_add_to_the_script(printed):
    options = "{partition: gpu, time: '4:00:00', cpus-per-task: 8, exclude: [a1, a2], exclusive: true, requeue: null}"
    script = printed(
        "submit.format=slurm", "recipe=toy", f"submit.slurm={options}", "submit.slurm.setup=['module load cuda']"
    )
    found = directives(script)
    assert (
        found.items()
        >= {
            "partition": "gpu",
            "time": "4:00:00",
            "cpus-per-task": "8",
            "exclude": "a1,a2",
            "exclusive": "",
        }.items()
    )
    assert "requeue" not in found
    assert "\nmodule load cuda\n" in script
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in script


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        pytest.param({"SLURM_JOB_ID": "7"}, "7", id="job"),
        pytest.param({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3", id="array"),
    ],
)
def test_the_script_runs_what_was_typed_and_requeues_itself(printed, programs, variables, number):
    typed = ["recipe=toy", "trainer.gpus=0", f"tags=[{quoted(ODD)},'a b']"]
    outputs = "my 'outputs'"
    script = printed("submit.format=slurm", *typed, f"path.outputs={quoted(outputs)}")
    programs.add("srun", status=75)
    programs.add("scontrol")
    assert programs.run(script, **variables) == 75
    ((words, _, _),) = programs.calls("srun")
    assert words[:3] == [sys.executable, "-m", "framework"]
    assert sorted(words[3:6]) == sorted(typed)
    assert value_of(words[6]) == f"{outputs}/job_{number}"
    assert words[7:] == ["resume=auto"]
    assert [call[0] for call in programs.calls("scontrol")] == [["requeue", number]]


def test_a_script_that_ends_otherwise_isnt_requeued(printed, programs):
    script = printed("submit.format=slurm", "recipe=toy")
    programs.add("srun", status=3)
    programs.add("scontrol")
    assert programs.run(script, SLURM_JOB_ID="7") == 3
    assert not programs.calls("scontrol")


def test_the_script_is_given_to_sbatch(submit, printed, programs):
    programs.add("sbatch", prints="41;other")
    answer = submit("submit.format=slurm", "recipe=toy")
    assert (answer.status, answer.out, answer.err) == (0, "Submitted toy: SLURM job 41\n", "")
    ((words, script, _),) = programs.calls("sbatch")
    assert words == ["--parsable"]
    assert script == printed("submit.format=slurm", "recipe=toy")


def test_one_json_document_answers(submit, printed, programs):
    programs.add("sbatch", prints="41")
    answer = submit("submit.format=slurm", "recipe=toy", "format=json")
    # The command itself sends the line before the document to stderr.
    document = json.loads(answer.out.partition("\n")[2])
    assert document["results"] == {"format": "slurm", "job": "41", "file": programs.calls("sbatch")[0][1]}
    answer = submit("-m", "submit.format=slurm", "recipe=toy", "seed=1,2", "submit.dry_run=true", "format=json")
    document = json.loads(answer.out)
    assert (document["sweep"], document["results"]["job"]) == (None, None)
    assert "-m framework sweep.worker=SWEEP\n" in document["results"]["file"]


def test_an_own_folder_of_options_stays_in_the_command(submit, programs):
    Path("more/recipe").mkdir(parents=True)
    Path("more/recipe/own.yaml").write_text(
        "# @package _global_\ndefaults: [toy]\nsubmit: {format: slurm, slurm: {partition: gpu}}\n"
    )
    answer = submit("--config-dir=more", "recipe=own", "submit.dry_run=true")
    assert answer.status == 0, answer.err
    assert directives(answer.out)["partition"] == "gpu"
    assert "-m framework trainer.gpus=0 --config-dir=more recipe=own path.outputs=" in answer.out


def test_a_run_that_is_resumed_keeps_its_folder(submit, train):
    run = train("recipe=toy", "trainer.max_steps=4", "trainer.gpus=0")
    answer = submit("submit.format=slurm", "submit.dry_run=true", f"resume={run}", "trust=true")
    assert answer.status == 0, answer.err
    assert f"-m framework trainer.gpus=0 resume={run} trust=true\n" in answer.out
    step = next((run / "checkpoints").glob("step_*"))
    answer = submit("submit.format=slurm", "submit.dry_run=true", f"resume={step}", "trust=true")
    assert answer.status == 2
    assert "from which every restart of the job would begin again. Name its run." in answer.err


# Sweeps


@pytest.mark.parametrize(
    "kind", [("seed=1,2",), ("sweep=optuna", "sweep.n_trials=3", "optimizer.lr=interval(0.1,0.2)")]
)
def test_a_sweep_is_begun_and_its_workers_are_submitted(submit, programs, kind):
    typed = ("-m", "submit.format=slurm", "submit.slurm.array=0-3", "recipe=toy", "checkpoint.monitor=val/loss", *kind)
    answer = submit("submit.dry_run=true", *typed)
    assert answer.status == 0, answer.err
    assert "-m framework sweep.worker=SWEEP\n" in answer.out
    assert not Path("outputs").exists()

    programs.add("sbatch", prints="41")
    answer = submit(*typed)
    assert answer.status == 0, answer.err
    (sweep,) = Path("outputs/multirun").iterdir()
    ((_, script, _),) = programs.calls("sbatch")
    assert directives(script).items() >= {"array": "0-3", "nodes": "1", "ntasks-per-node": "1"}.items()
    assert f"-m framework sweep.worker={sweep}\n" in script
    plan = json.loads((sweep / "sweep.json").read_text())
    assert plan["job"] == "train"
    assert "submit" not in json.dumps(plan)
    assert answer.out.splitlines() == [f"The sweep is in {sweep}", "Submitted toy: SLURM job 41"]


def test_more_workers_of_a_sweep_are_submitted_after_a_refusal(submit, programs):
    programs.add("sbatch", prints="no such account", status=1)
    answer = submit("-m", "submit.format=slurm", "recipe=toy", "seed=1,2", "trainer.gpus=2", "sweep.jobs=2")
    (sweep,) = Path("outputs/multirun").iterdir()
    assert answer.status == 1
    assert "sbatch has failed with status 1: no such account" in answer.err
    assert f"Submit its workers: -m resume={sweep} job=submit …" in answer.err
    programs.add("sbatch", prints="42")
    answer = submit("-m", f"resume={sweep}", "submit.format=slurm", "trainer.gpus=2")
    assert answer.status == 0, answer.err
    _, (_, script, _) = programs.calls("sbatch")
    assert f"sweep.worker={sweep}\n" in script
    # Two trials at a time, of two GPUs each.
    assert directives(script)["gpus-per-node"] == "4"


# Kubernetes


def test_a_trainjob_has_only_fields_of_kubeflow(printed):
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    own = "submit.trainjob={metadata: {namespace: team}, spec: {trainer: {env: [{name: A, value: b}]}}}"
    text = printed(*TRAINJOB, own, "trainer.gpus=2", "topology.nnodes=2", f"tags=[{quoted(ODD)}]")
    manifest = yaml.safe_load(text)
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    # A field that isn't known would be left out.
    assert job is not None
    assert job.to_dict() == manifest
    name = manifest["metadata"].pop("name")
    assert re.fullmatch(r"toy-[0-9a-f]{6}", name)
    trainer = manifest["spec"]["trainer"]
    assert manifest["metadata"] == {"namespace": "team"}
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 2}}
    assert trainer["command"] == ["torchrun", "-m", "framework"]
    # Kubernetes expands `$(NAME)`, and writes `$$` as `$`.
    assert [text.replace("$$(", "$(") for text in trainer["args"]][-3:] == [
        f"tags=[{quoted(ODD)}]",
        f"path.outputs=s3://bucket/team/{name}",
        "resume=auto",
    ]
    assert not any(re.search(r"(?<!\$)\$\(", text) for text in trainer["args"])


def test_a_trainjob_is_given_to_kubectl(submit, programs):
    programs.add("kubectl", prints="created")
    answer = submit(*TRAINJOB)
    assert answer.status == 0, answer.err
    ((words, text, _),) = programs.calls("kubectl")
    name = yaml.safe_load(text)["metadata"]["name"]
    assert words == ["apply", "--filename=-"]
    assert answer.out == f"created\nSubmitted toy: TrainJob {name}\n"


# SkyPilot


@pytest.mark.exhaustive
def test_a_task_has_only_fields_of_skypilot(printed, monkeypatch):
    text = printed(*SKYPILOT, "trainer.gpus=4", "submit.skypilot.resources={accelerators: H100, use_spot: true}")
    task = yaml.safe_load(text)
    of_task, of_resources = skypilot.schemas(monkeypatch)
    jsonschema.validate(task, of_task)
    jsonschema.validate(task["resources"], of_resources)
    assert task["resources"] == {
        "job_recovery": {"recover_on_exit_codes": [75]},
        "accelerators": "H100:4",
        "use_spot": True,
    }
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "nodes": 2}, of_task)


def test_each_node_of_a_task_runs_what_was_typed(printed, programs):
    tags = f"tags=[{quoted(ODD)}]"
    task = yaml.safe_load(printed(*SKYPILOT, "topology.nnodes=2", tags))
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("toy", 2, ".")
    programs.add("python")
    variables = {"SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert programs.run(task["run"], **variables) == 0
    ((words, _, _),) = programs.calls("python")
    assert words == [
        "-m",
        "framework",
        "trainer.gpus=0",
        "recipe=toy",
        "topology.nnodes=2",
        tags,
        "path.outputs=s3://bucket/team/sky-1",
        "resume=auto",
        "topology.node_rank=1",
        "topology.rdzv_endpoint=10.0.0.1:29400",
    ]


def test_a_task_is_given_to_sky(submit, programs):
    programs.add("sky")
    answer = submit(*SKYPILOT)
    assert answer.status == 0, answer.err
    ((words, _, (text,)),) = programs.calls("sky")
    assert words[:-1] == ["jobs", "launch", "--yes", "--detach-run"]
    assert yaml.safe_load(text)["num_nodes"] == 1


# What is refused


REFUSED = {
    "recipe=toy": "job=submit needs submit.format, one of slurm, trainjob, skypilot.",
    "recipe=toy submit.format=pbs": "submit.format=pbs: must be one of slurm, trainjob, skypilot",
    "recipe=toy submit.format=slurm trainer.gpus=auto": "Type trainer.gpus=N, the GPUs of each node",
    "recipe=toy submit.format=slurm trainer.gpus=3 topology.procs_per_node=2": "can't be split into processes",
    "recipe=toy submit.format=slurm data.global_batch_size=1 topology.procs_per_node=2": "data.global_batch_size=1",
    "recipe=toy submit.format=slurm model.out_features=-1": "out_features",
    "recipe=toy submit.format=slurm launcher=local topology.procs_per_node=2": "srun starts the ranks. Leave it out.",
    "recipe=toy submit.format=slurm launcher.max_restarts=3 topology.procs_per_node=2": "ranks that srun has started",
    "recipe=toy submit.format=slurm topology.node_rank=1 topology.nnodes=2": "which the cluster decides.",
    "recipe=toy submit.format=slurm submit.slurm.nodes=2": "Type topology.nnodes instead.",
    "recipe=toy submit.format=slurm submit.slurm.p=gpu": "this isn't the long name of an option of sbatch",
    "recipe=toy submit.format=slurm submit.slurm.time={a:1}": "an option of sbatch is a text, a number",
    "recipe=toy submit.format=slurm trainer.gpus=4 submit.slurm.gpus_per_node=2": "the run has 4 GPUs on each node",
    "recipe=mnist submit.format=slurm data.mirrors=['https://me:pass1@host']": "would be readable",
    "recipe=toy submit.format=trainjob": "would be lost with the machines of the job. Name a bucket",
    "recipe=toy submit.format=trainjob path.outputs=/mnt/a": "submit.trainjob.spec.trainer.image=REGISTRY/NAME:TAG",
    f"recipe=toy submit.format=trainjob {S3} {IMAGE} submit.trainjob.spec.trainer.numNodes=2": "numNodes follows from",
    f"recipe=toy submit.format=skypilot {S3} trainer.gpus=2": "submit.skypilot.resources.accelerators=H100",
    f"recipe=toy submit.format=skypilot {S3} trainer.gpus=2 submit.skypilot.resources.accelerators=A:4": "has 2 GPUs",
    f"-m recipe=toy submit.format=skypilot {S3} seed=1,2": "takes no sweep (-m)",
    "-m recipe=toy submit.format=slurm seed=1,2 submit.slurm.nodes=2": "Type topology.nnodes instead.",
}


@pytest.mark.parametrize(("overrides", "answer"), REFUSED.items())
def test_what_cant_be_met_is_refused_before_it_waits(submit, programs, overrides, answer):
    for name in ("sbatch", "kubectl", "sky"):
        programs.add(name)
    given = submit(*overrides.split())
    assert given.status == 2
    assert answer in given.err
    assert not any(programs.calls(name) for name in ("sbatch", "kubectl", "sky"))
    assert not list(Path.cwd().iterdir())


def test_an_option_of_several_lines_is_refused(submit):
    answer = submit("submit.format=slurm", "recipe=toy", "submit.slurm.comment='a\nb'")
    assert answer.status == 2
    assert "an option of sbatch is one line." in answer.err


@pytest.mark.parametrize(
    ("typed", "program"),
    [(("submit.format=slurm", "recipe=toy"), "sbatch"), (TRAINJOB, "kubectl"), (SKYPILOT, "sky")],
    ids=["slurm", "trainjob", "skypilot"],
)
def test_a_missing_program_is_named(submit, monkeypatch, typed, program):
    monkeypatch.setenv("PATH", "/nowhere")
    answer = submit(*typed)
    assert answer.status == 2
    assert f"needs {program}, which isn't on PATH." in answer.err
    assert "submit.dry_run=true" in answer.err


def test_a_call_from_python_submits_nothing():
    with pytest.raises(ConfigError, match="job=submit is for the command"):
        framework.train("toy", overrides=["job=submit"])
