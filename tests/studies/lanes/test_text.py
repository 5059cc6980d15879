"""The corpus: what is read, that nothing of it moves when other files come, and what a token stream is."""

import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.lanes.config import BOS, VOCABULARY
from studies.lanes.text import SPLITS, Document, TextCorpus, batches, standard_library

pytestmark = pytest.mark.study

THIRDS = (0.4, 0.3, 0.3)
ALL = (1.0, 0.0, 0.0)
contents = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=12)


def corpus_of(*data: bytes, shares: tuple[float, float, float] = THIRDS) -> TextCorpus:
    return TextCorpus(tuple(Document(f"{i}", one) for i, one in enumerate(data)), shares)


@pytest.fixture(scope="module")
def library() -> TextCorpus:
    return standard_library()


def test_the_standard_library_is_that_of_the_running_python(library: TextCorpus) -> None:
    names = [d.name for d in library.documents]
    root = Path(sysconfig.get_path("stdlib"))
    assert names == sorted(names)
    assert len(names) == len(set(names)) > 500
    for name in ("argparse.py", "json/decoder.py"):
        assert library.documents[names.index(name)].data == (root / name).read_bytes()
    assert "pydoc_data/topics/lambda" in names
    assert "pydoc_data/topics.py" not in names
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(name.split("/")[:-1])]
    assert library.sha256 == standard_library().sha256


def test_the_splits_are_a_partition_by_content(library: TextCorpus) -> None:
    parts = {split: library.split(split) for split in SPLITS}
    assert sorted(d.name for part in parts.values() for d in part) == [d.name for d in library.documents]
    hashes = {split: {d.sha256 for d in part} for split, part in parts.items()}
    assert not hashes["train"] & hashes["tune"] | hashes["train"] & hashes["test"] | hashes["tune"] & hashes["test"]
    assert 0.7 < len(parts["train"]) / len(library.documents) < 0.9


@given(contents, st.integers(1, 100))
def test_a_stream_is_bos_and_bytes_and_a_limit_cuts_it(data: list[bytes], limit: int) -> None:
    corpus = corpus_of(*data, shares=ALL)
    whole = corpus.stream("train")
    assert whole.dtype == torch.int64
    ordered = [d.data for d in corpus.split("train")]
    assert whole.tolist() == [token for one in ordered for token in (BOS, *one)]
    cut = corpus.stream("train", limit)
    assert torch.equal(cut, whole[: len(cut)])
    assert int((cut != BOS).sum()) == min(limit, sum(map(len, data)))
    assert cut[-1] != BOS
    assert int(whole.max()) < VOCABULARY


def test_batches_are_windows_of_the_stream_from_a_passed_generator() -> None:
    tokens = torch.arange(40)
    drawn = list(batches(tokens, size=5, length=7, steps=60, generator=torch.Generator().manual_seed(1)))
    again = list(batches(tokens, size=5, length=7, steps=60, generator=torch.Generator().manual_seed(1)))
    every = torch.cat(drawn)
    assert every.shape == (300, 8)
    assert every.dtype == torch.int64
    assert torch.equal(every, every[:, :1] + torch.arange(8))
    assert set(every[:, 0].tolist()) == set(range(33))  # each of the 33 places is drawn, the last one too
    assert all(map(torch.equal, drawn, again))
    other = next(batches(tokens, size=5, length=7, steps=1, generator=torch.Generator().manual_seed(2)))
    assert not torch.equal(other, drawn[0])
