"""What rank 0 compares and offers, through a real store: `HashStore.wait` may miss its time-out and never return."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from framework.errors import ConfigError, RunError
from framework.launch import offer
from framework.launch.offer import Agreement, Fingerprint, Offer, differences, fingerprint
from framework.launch.watch import Limits
from framework.topology import Topology

WAIT_S = 30.0
OURS = Fingerprint(
    ("recipe=toy", "seed=1"), {"conf/a.yaml": "1", "recipes/b.py": "2"}, {"python": "3.11", "torch": "2"}
)
OFFER = Offer(
    entry="module:function",
    run_dir="/runs/one",
    topology=Topology(nnodes=2, procs_per_node=2, gpus_per_node=0, span=1),
    limits=Limits(init_timeout_s=1.0, timeout_s=2.0, late_after_s=3.0),
    config="a: ä\n",
    overrides="- b\n",
)


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def changed(**parts: object) -> Fingerprint:
    return Fingerprint(**{**{name: getattr(OURS, name) for name in ("arguments", "files", "versions")}, **parts})


def test_the_same_differs_in_nothing():
    assert differences(OURS, OURS) == []
    assert changed().digest == OURS.digest


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        (changed(arguments=("recipe=toy", "seed=2")), "arguments: seed=2; rank 0 has seed=1"),
        (changed(arguments=("recipe=toy",)), "arguments: nothing there; rank 0 has seed=1"),
        (changed(arguments=("seed=1", "recipe=toy")), "arguments: in another order: seed=1 recipe=toy"),
        (changed(files={"conf/a.yaml": "9", "recipes/b.py": "2"}), "conf/a.yaml isn't the same as rank 0's"),
        (changed(files={"recipes/b.py": "2"}), "conf/a.yaml isn't there; rank 0 has it"),
        (changed(files={**OURS.files, "conf/c.yaml": "3"}), "conf/c.yaml is there; rank 0 doesn't have it"),
        (changed(versions={"python": "3.10", "torch": "2"}), "python 3.10; rank 0 has 3.11"),
    ],
)
def test_what_differs_is_named_with_both_values(theirs, line):
    assert differences(theirs, OURS) == [line]
    assert theirs.digest != OURS.digest


def test_a_fingerprint_has_every_source_of_configurations(tmp_path: Path):
    before = fingerprint(["a=1"], working_dir=tmp_path)
    assert any(name.endswith("trainer/default.yaml") for name in before.files)
    assert {"python", "framework", "torch"} == before.versions.keys()
    for file in ("conf/recipe/mine.yaml", "mine/code.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    after = fingerprint(["a=1", "topology.node_rank=0"], working_dir=tmp_path)
    assert {"conf/recipe/mine.yaml", "mine/code.py"} <= after.files.keys()
    (tmp_path / "mine/code.py").write_text("x = 2\n")
    other = fingerprint(["a=1", "topology.node_rank=1"], working_dir=tmp_path)  # the number of a node may differ
    assert differences(other, after) == ["mine/code.py isn't the same as rank 0's"]


@pytest.mark.parametrize("made", [OFFER, 2], ids=["an offer", "an exit status"])
def test_what_rank_0_says_arrives(made):
    store = new_store()
    said, heard = (Agreement(store, count=2) for _ in range(2))
    said.end(made) if isinstance(made, int) else said.make(made)
    assert heard.take(timeout_s=WAIT_S) == made


def test_nothing_of_an_earlier_attempt_is_taken_but_its_run_directory():
    store = new_store()
    before = Agreement(store, count=2)
    assert before.remembered() is None
    before.remember("/runs/one")
    before.make(OFFER)
    after = Agreement(store, count=2, attempt=1)
    with pytest.raises(TimeoutError):
        after.take(timeout_s=0.1)
    assert after.remembered() == "/runs/one"


def test_a_place_that_a_living_process_has_is_refused():
    store = new_store()
    first, second = (Agreement(store, count=3, noun="node", place="node0:1") for _ in range(2))
    with first.beating():
        first.come(1, own=OURS, host="b")
        with pytest.raises(ConfigError, match=rf"Node 1 of 3 is there already .*: process {os.getpid()} on b\.\n"):
            second.come(1, own=OURS, host="c")
    second.leave()  # nothing: it has no place
    assert not store.check(["framework/0/offer/left/1"])


def test_a_place_whose_process_has_died_is_given_to_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offer, "_SILENT_S", 0.2)
    store = new_store()
    first, second = (Agreement(store, count=2, noun="node") for _ in range(2))
    with first.beating():
        first.come(1, own=OURS, host="b")
        first.leave()
    second.come(1, own=changed(arguments=("recipe=other",)), host="c")
    assert not store.check(["framework/0/offer/left/1"])
    with pytest.raises(ConfigError, match="Node 1 on c:"):
        Agreement(store, count=2, noun="node").compare(OURS, timeout_s=WAIT_S)


def test_a_rank_that_comes_twice_does_not_replace_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offer, "_SILENT_S", 0.1)
    store = new_store()
    for _ in range(2):
        Agreement(store, count=3).come(1, own=OURS, host="b")
    with pytest.raises(RunError, match=r"Rank 2 of 3 didn't come within backend.init_timeout=0.1 s"):
        Agreement(store, count=3).compare(OURS, timeout_s=0.1)


def test_the_host_of_the_store_waits_until_all_who_came_have_left():
    store = new_store()
    first, second = (Agreement(store, count=3) for _ in range(2))
    first.come(1, own=OURS, host="b")
    second.come(2, own=OURS, host="b")
    first.leave()
    waiting = threading.Thread(target=lambda: Agreement(store, count=3).wait_for_all_to_leave(timeout_s=WAIT_S))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    second.leave()
    waiting.join(WAIT_S / 2)
    assert not waiting.is_alive()


def test_a_wait_that_times_out_prints_nothing(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(TimeoutError):
        Agreement(new_store(), count=2).take(timeout_s=0.1)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_differ_are_named_together():
    agreement = Agreement(new_store(), count=5)
    agreement.come(1, own=changed(), host="a")
    for number in (2, 3):
        agreement.come(number, own=changed(arguments=("recipe=toy", "seed=2")), host="b")
    agreement.come(4, own=changed(files={}), host="c")
    with pytest.raises(ConfigError) as error:
        agreement.compare(OURS, timeout_s=WAIT_S)
    lines = str(error.value).splitlines()
    assert lines[1:3] == ["Ranks 2, 3 on b:", "  arguments: seed=2; rank 0 has seed=1"]
    assert lines[3] == "Rank 4 on c:"
    assert "Rank 1" not in str(error.value)
    agreed = Agreement(new_store(), count=3)
    for number in (1, 2):
        agreed.come(number, own=changed(), host="b")
    agreed.compare(OURS, timeout_s=WAIT_S)
