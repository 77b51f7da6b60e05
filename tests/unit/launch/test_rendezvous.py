"""What rank 0 compares before a run of ranks that started alone, and how it names who differs or is missing."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from framework.errors import ConfigError, RunError
from tests.helpers.internals import SECRET, Fingerprint, MeetingPoint, Rendezvous, differences, fingerprint

OURS = {"recipe": "toy", "seed": "1", "conf/a.yaml": "sha256 1", "python": "3.11"}


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({**OURS, "seed": "2"}, "seed: 2; rank 0 has 1"),
        ({**OURS, "conf/a.yaml": "sha256 9"}, "conf/a.yaml: sha256 9; rank 0 has sha256 1"),
        ({**OURS, "conf/c.yaml": "sha256 3"}, "conf/c.yaml: sha256 3; rank 0 has none"),
        ({name: OURS[name] for name in ("recipe", "conf/a.yaml", "python")}, "seed: missing; rank 0 has 1"),
    ],
)
def test_what_differs_is_named_with_both_values(theirs, line):
    assert differences(OURS, OURS) == []
    assert differences(theirs, OURS) == [line]


def test_a_fingerprint_has_every_source_of_configurations(tmp_path: Path):
    before = fingerprint(["a=1"], working_dir=tmp_path)
    assert any(name.endswith("trainer/default.yaml") for name in before)
    assert {"python", "framework", "torch", "a"} <= before.keys()
    for file in ("conf/recipe/mine.yaml", "mine/code.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    after = fingerprint(["a=1", "topology.node_rank=0"], working_dir=tmp_path)
    assert {"conf/recipe/mine.yaml", "mine/code.py"} <= after.keys()
    (tmp_path / "mine/code.py").write_text("x = 2\n")
    # The number of a node may differ.
    other = fingerprint(["a=1", "topology.node_rank=1"], working_dir=tmp_path)
    (difference,) = differences(other, after)
    assert difference.startswith("mine/code.py: sha256 ")


def test_a_rank_with_another_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = listener.getsockname()[:2]
    point = MeetingPoint(endpoint=endpoint, kind="node", address="the store", port_option="a port")
    zero, other = (Rendezvous(OURS, point, index=index, count=2) for index in range(2))
    monkeypatch.setenv(SECRET, "one")
    zero.open(timeout_s=30.0)
    monkeypatch.setenv(SECRET, "other")
    with pytest.raises(ConfigError, match=f"its secret isn't node 0's: set {SECRET}"):
        other.follow(timeout_s=30.0)
    with pytest.raises(ConfigError, match=f"Node 1 on an unknown host:\n  its secret isn't node 0's: set {SECRET}"):
        zero.compare(timeout_s=30.0)
    other.close(2)
    zero.close(2)


def test_different_and_missing_ranks_are_named_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = listener.getsockname()[:2]

    point = MeetingPoint(endpoint=endpoint, kind="rank", address="the store", port_option="MASTER_PORT")

    def rank(index: int, own: Fingerprint) -> Rendezvous:
        return Rendezvous(own, point, index=index, count=4)

    zero = rank(0, OURS)
    other = {**OURS, "seed": "2"}
    zero.open(timeout_s=30.0)
    with ThreadPoolExecutor() as threads:
        ranks = [rank(1, OURS), rank(2, other)]
        answers = [threads.submit(each.follow, timeout_s=30.0) for each in ranks]
        with pytest.raises(RunError, match=r"Rank 3 of 4 didn't come to the store within backend.init_timeout=2 s"):
            zero.compare(timeout_s=2.0)
        ranks.append(rank(3, other))
        answers.append(threads.submit(ranks[-1].follow, timeout_s=30.0))
        with pytest.raises(ConfigError) as error:
            zero.compare(timeout_s=30.0)
        closing = threads.submit(zero.close, error.value.exit_status)
        assert [answer.result() for answer in answers] == [2, 2, 2]
        for each in ranks:
            each.close(2)
        closing.result()
    lines = str(error.value).splitlines()
    assert lines[1] == f"Ranks 2–3 on {socket.gethostname()}:"
    assert lines[2] == "  seed: 2; rank 0 has 1"
    assert "Rank 1" not in str(error.value)
    assert "seed: 2; rank 0 has 1" in str(ranks[1].refusal(2))
