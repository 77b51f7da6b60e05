"""Token files: the same training as on tokens in memory, packed documents, small memory, and what is refused."""

from __future__ import annotations

import pickle
import resource

import numpy
import pytest
import torch

from framework import DataError, TokenFile
from recipes.gpt import GPT, write_token_files
from tests.helpers import results

pytestmark = pytest.mark.usefixtures("own_state")

TEXT = "To be, or not to be: that is the question.\n" * 60
SMALL = ("model.layers=1", "model.heads=2", "model.channels=16", "model.context=16", "scheduler.total_steps=2000")
SHORT = (*SMALL, "trainer.max_steps=6", "trainer.val_check_interval=6", "trainer.log_every_n_steps=1", "logger=jsonl")


@pytest.fixture
def tokens_run(train, tmp_path):
    """Write the files of a text and train on them."""
    (tmp_path / "input.txt").write_text(TEXT)
    write_token_files(str(tmp_path / "input.txt"), str(tmp_path / "tokens"))
    return lambda *overrides: train("recipe=gpt_tokens", f"data.root={tmp_path}/tokens", *SHORT, *overrides)


@pytest.mark.multiproc
def test_training_equals_that_on_tokens_in_memory(tokens_run, train, tmp_path):
    every = "data.datasets.stride=1"
    one = tokens_run(every)
    memory = train("recipe=gpt_char", f"data.root={tmp_path}", "data.datasets.file=input.txt", *SHORT)
    results.assert_same(results.saved(one)["model"], results.saved(memory)["model"])
    for name in ("train/loss", "val/loss"):
        assert results.curve(one, name) == results.curve(memory, name)

    part = tokens_run(every, "trainer.max_steps=3", "trainer.val_check_interval=3", "data.num_workers=1")
    resumed = train(f"resume={part}", "trainer.max_steps=6", "trainer.val_check_interval=6")
    results.assert_same(results.saved(resumed)["model"], results.saved(one)["model"])
    two = tokens_run(every, "topology.procs_per_node=2")
    for name in ("train/loss", "val/loss"):
        assert results.curve(two, name) == pytest.approx(results.curve(one, name), rel=2e-4)
    # The task passes the documents on.
    assert results.results(tokens_run("data.datasets.document_end=0"))["steps"] == 6


def test_the_class_has_both_names(tmp_path):
    from framework import data

    assert data.TokenFile is TokenFile
    assert not hasattr(data, "TokenFiles")


def written(tmp_path, tokens, dtype="uint16", name="tokens.bin"):
    path = tmp_path / name
    array = numpy.asarray(tokens, dtype)
    if name.endswith(".npy"):
        numpy.save(path, array)
    else:
        array.tofile(path)
    return path


@pytest.mark.parametrize(("name", "dtype"), [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "int32")])
def test_windows_are_slices_of_the_tokens(tmp_path, name, dtype):
    tokens = torch.arange(100) + 7
    path = written(tmp_path, tokens, dtype, name)
    for block, stride in ((10, None), (10, 3), (99, None), (1, 1)):
        data = TokenFile(path, block, stride=stride, dtype=dtype, vocab_size=107)
        begins = range(0, 100 - block, stride or block)
        assert len(data) == len(begins)
        for index, begin in enumerate(begins):
            window, following = data[index]
            assert torch.equal(window, tokens[begin : begin + block])
            assert torch.equal(following, tokens[begin + 1 : begin + block + 1])
        assert torch.equal(pickle.loads(pickle.dumps(data))[-1][0], data[len(data) - 1][0])
        with pytest.raises(IndexError):
            data[len(data)]


def test_packed_documents_do_not_see_each_other(tmp_path):
    first = [1, 2, 3, 0]
    second = [4, 5, 6, 7]
    path = written(tmp_path, [*first, *second, 8])
    tokens, _, documents = TokenFile(path, 8, vocab_size=9, document_end=0)[0]
    assert documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, channels=8, context=8, vocab_size=9).double()
    packed = model(tokens[None], documents[None])
    alone = model(tokens[None, :4])
    assert torch.allclose(packed[:, :4], alone)
    # What the first document says changes nothing in the second.
    other = tokens.clone()
    other[:3] = torch.tensor([3, 1, 1])
    assert torch.equal(model(other[None], documents[None])[:, 4:], packed[:, 4:])
    assert not torch.allclose(model(other[None])[:, 4:], model(tokens[None])[:, 4:])


def test_memory_stays_small_for_a_large_file(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(6 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = TokenFile(path, 1024, vocab_size=50257)
    assert len(data) == ((6 << 29) - 1025) // 1024 + 1
    for index in range(0, len(data), len(data) // 5000):
        assert int(data[index][0].sum()) == 0
    # Kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    ("content", "keywords", "said"),
    [
        (b"", {}, "0 tokens, too few for a window of 4"),
        (b"1" * 11, {}, "11 bytes, which is no whole number of uint16 tokens"),
        (numpy.arange(100, dtype="uint32").tobytes(), {}, "has 4 bytes a token. Use dtype=uint32"),
        (numpy.arange(100, dtype="uint16").tobytes(), {"dtype": "uint32", "vocab_size": 100}, "aren't uint32"),
        (numpy.arange(100, dtype="uint16").tobytes(), {"vocab_size": 60}, "Token 60 of .* is 60, and vocab_size=60"),
        (numpy.full(9, -100, dtype="int32").tobytes(), {"dtype": "int32", "vocab_size": 60}, "is -100"),
        (numpy.arange(100, dtype="uint16").tobytes(), {"dtype": "float16"}, "no type of integers"),
        (numpy.arange(100, dtype="uint16").tobytes(), {"dtype": "token"}, "no type of integers"),
        (numpy.arange(100, dtype="uint16").tobytes(), {"stride": 0}, "stride=0 must be at least 1"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, keywords, said):
    path = tmp_path / "wrong.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        TokenFile(path, 4, **keywords)


def test_damaged_npy_and_missing_files_are_refused(tmp_path):
    path = written(tmp_path, range(1000), name="cut.npy")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cut off"):
        TokenFile(path, 4)
    with pytest.raises(DataError, match="It must have one dimension"):
        TokenFile(written(tmp_path, [[1, 2], [3, 4]], name="two.npy"), 1)
    with pytest.raises(DataError, match="There is no token file"):
        TokenFile(tmp_path / "none.bin", 1)


def test_a_file_cut_off_while_it_is_read_is_named(tmp_path):
    path = written(tmp_path, range(1000))
    data = TokenFile(path, 4)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"ends before token 1,001|ends before token .* it was cut off"):
        data[len(data) - 1]


def test_a_wrong_token_is_refused_before_the_first_step(tmp_path, train, capfd):
    for part in ("train", "val"):
        written(tmp_path, [5] * 500 + [96] + [5] * 500, name=f"{part}.bin")
    train("recipe=gpt_tokens", f"data.root={tmp_path}", *SHORT, status=2)
    assert "Token 500 of" in capfd.readouterr().err
