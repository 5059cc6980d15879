"""The corpus: what is read, that nothing of it moves when other files come, and what a token stream is."""

import hashlib
import os
import sysconfig
from contextlib import suppress
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.lanes.config import BOS, VOCABULARY
from studies.lanes.text import SPLITS, Corpus, Document, batches, read_folder, standard_library

pytestmark = pytest.mark.study

THIRDS = (0.4, 0.3, 0.3)
ALL = (1.0, 0.0, 0.0)
contents = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=12)


def corpus_of(*data: bytes, shares: tuple[float, float, float] = THIRDS) -> Corpus:
    return Corpus(tuple(Document(f"{i}", one) for i, one in enumerate(data)), shares)


def where(corpus: Corpus) -> dict[str, str]:
    """Name -> split."""
    found = {}
    for split in SPLITS:
        with suppress(ValueError):
            found |= {d.name: split for d in corpus.split(split)}
    return found


@pytest.fixture(scope="module")
def library() -> Corpus:
    return standard_library()


def test_the_standard_library_is_that_of_the_running_python(library: Corpus) -> None:
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


def test_the_splits_are_a_partition_by_content(library: Corpus) -> None:
    parts = {split: library.split(split) for split in SPLITS}
    assert sorted(d.name for part in parts.values() for d in part) == [d.name for d in library.documents]
    hashes = {split: {d.sha256 for d in part} for split, part in parts.items()}
    assert not hashes["train"] & hashes["tune"] | hashes["train"] & hashes["test"] | hashes["tune"] & hashes["test"]
    assert 0.7 < len(parts["train"]) / len(library.documents) < 0.9


@given(contents, contents)
def test_other_files_move_no_file_and_copies_stay_together(data: list[bytes], more: list[bytes]) -> None:
    before, after = corpus_of(*data), corpus_of(*data, *more, *data)
    moved = where(after)
    assert where(before).items() <= moved.items()
    copies = len(data) + len(more)
    assert all(moved[f"{i}"] == moved[f"{copies + i}"] for i in range(len(data)))


def test_the_shares_are_shares_of_the_hashes() -> None:
    """The place of a content is the first 64 bits of its SHA-256, in a fraction of one."""
    data = [str(i).encode() for i in range(300)]
    for split, (low, high) in {"train": (0, 0.4), "tune": (0.4, 0.7), "test": (0.7, 1)}.items():
        places = {d.data for d in corpus_of(*data).split(split)}
        expected = {one for one in data if low <= int.from_bytes(hashlib.sha256(one).digest()[:8], "big") / 2**64 < high}
        assert places == expected
    assert len(corpus_of(*data, shares=ALL).split("train")) == 300


def test_the_hash_tells_every_change() -> None:
    corpus = corpus_of(b"one", b"two")
    renamed = Corpus((Document("0", b"one"), Document("2", b"two")), THIRDS)
    different = {c.sha256 for c in (corpus, corpus_of(b"one", b"twp"), corpus_of(b"two", b"one"), renamed, corpus_of(b"one"))}
    assert len(different) == 5
    assert corpus_of(b"one", b"two", shares=(0.8, 0.1, 0.1)).sha256 == corpus.sha256
    with pytest.raises(FrozenInstanceError):
        corpus.documents = ()


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


def test_a_stream_of_the_library_is_its_bytes(library: Corpus) -> None:
    stream = library.stream("test")
    first = library.split("test")[0]
    assert bytes(stream[1 : 1 + len(first.data)].tolist()) == first.data
    assert len(stream) == sum(len(d.data) + 1 for d in library.split("test"))


def test_an_empty_split_is_a_sentence() -> None:
    corpus = corpus_of(b"only", shares=ALL)
    with pytest.raises(ValueError, match=r"none of the 1 documents is in the split 'tune'"):
        corpus.stream("tune")


def test_a_folder_is_read_whole_and_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    text = {"a.txt": "grüße\r\n", "deep/er/b.md": "\ufeffsigned", "deep/B.txt": "日本", "z": "no suffix"}
    for name, content in text.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode("utf-8"))
    binary = {"nul": b"text\0text", "latin": "grüße".encode("latin-1"), "wide": "text".encode("utf-16"), "half": "日".encode()[:2]}
    for name, content in binary.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    odd = os.fsdecode(b"odd-\xff")
    (tmp_path / odd).write_text("name")
    corpus = read_folder(tmp_path)
    found = {d.name: d.data for d in corpus.documents}
    assert found == {name: content.encode("utf-8") for name, content in text.items()} | {odd: b"name"}
    assert list(found) == sorted(found, key=os.fsencode)
    assert len(corpus.sha256) == 64


def test_a_folder_without_text_is_one_sentence(tmp_path: Path) -> None:
    empty, binary, file = tmp_path / "empty", tmp_path / "binary", tmp_path / "file.txt"
    empty.mkdir()
    binary.mkdir()
    (empty / "nothing").touch()
    (binary / "a").write_bytes(b"\xff\xfe\0")
    file.write_text("text")
    cases = {
        empty: "there is no text in",
        binary: "there is no text in",
        file: "there is no folder",
        tmp_path / "no": "no folder",
    }
    for path, words in cases.items():
        with pytest.raises(ValueError, match=words) as raised:
            read_folder(path)
        assert str(path) in str(raised.value)
        assert "give" in str(raised.value)
        assert "\n" not in str(raised.value)


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


def test_a_batch_owns_its_memory() -> None:
    tokens = torch.arange(10)
    batch = next(batches(tokens, size=2, length=3, steps=1, generator=torch.Generator()))
    batch.zero_()
    assert torch.equal(tokens, torch.arange(10))


def test_a_stream_shorter_than_a_window_is_a_sentence() -> None:
    assert next(batches(torch.arange(8), size=1, length=7, steps=1, generator=torch.Generator())).tolist() == [list(range(8))]
    with pytest.raises(ValueError, match=r"8 tokens, fewer than a window of 8 \+ 1"):
        batches(torch.arange(8), size=1, length=8, steps=1, generator=torch.Generator())
