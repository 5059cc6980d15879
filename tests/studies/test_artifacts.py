"""An artifact that was changed is refused, and a published folder is the new one or the old one, whole."""

import shutil
from pathlib import Path

import pytest
import torch

from mi_route2.files import whole_folder
from studies.common.artifacts import read_part, write_part


def test_a_part_is_refused_where_any_of_its_bytes_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    write_part(path, "me", {"bpb": 3.25, "name": "x"}, {"t": torch.arange(4.0)})
    content, tensors = read_part(path, "me") or ({}, {})
    assert content == {"bpb": 3.25, "name": "x"}
    assert torch.equal(tensors["t"], torch.arange(4.0))
    before = path.read_bytes()
    for damaged in (before[:-9], before.replace(b"3.25", b"3.26"), b"[]", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged.*delete .* to have it made again"):
            read_part(path, "me")
    path.write_bytes(before)
    values = path.with_suffix(".safetensors")
    whole_values = values.read_bytes()
    values.write_bytes(whole_values[:-1] + bytes([whole_values[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged"):
        read_part(path, "me")
    values.unlink()
    with pytest.raises(ValueError, match="damaged"):
        read_part(path, "me")
    assert read_part(tmp_path / "none.json", "me") is None


def test_a_part_of_other_settings_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "part.json", "me", {})
    with pytest.raises(ValueError, match="made from other settings or another run; delete"):
        read_part(tmp_path / "part.json", "you")


def test_a_number_that_is_not_finite_is_said_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p\.json is not written: a number in it is NaN or infinite"):
        write_part(tmp_path / "p.json", "a", {"x": float("nan")}, {"t": torch.ones(2)})
    assert not list(tmp_path.iterdir())


def test_a_part_without_tensors_takes_the_place_of_one_with_them(tmp_path: Path) -> None:
    write_part(tmp_path / "p.json", "a", {"x": 1}, {"t": torch.ones(2)})
    write_part(tmp_path / "p.json", "a", {"x": 2})
    assert read_part(tmp_path / "p.json", "a") == ({"x": 2}, {})


def test_tensors_of_another_part_are_refused_even_if_they_are_equal(tmp_path: Path) -> None:
    for name, identity in (("one", "a"), ("other", "b")):
        write_part(tmp_path / f"{name}.json", identity, {}, {"x": torch.zeros(3)})
    (tmp_path / "other.safetensors").replace(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match="do not match their checksum"):
        read_part(tmp_path / "one.json", "a")


def test_a_part_that_is_made_again_and_broken_off_is_missing_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(tmp_path / "one.json", "a", {}, {"x": torch.zeros(2)})
    monkeypatch.setattr("studies.common.artifacts.write_json", None)  # as a kill before it would
    with pytest.raises(TypeError):
        write_part(tmp_path / "one.json", "b", {}, {"x": torch.ones(2)})
    assert read_part(tmp_path / "one.json") is None


@pytest.mark.parametrize("name", ["place", "place[1]"])
def test_a_folder_whose_replacement_was_killed_between_two_renames_comes_back(tmp_path: Path, name: str) -> None:
    for folder, text in ((f".{name}.99.old", "former"), (f".{name}.v2.98.old", "another's"), (f".{name}.x.old", "a user's")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(text)
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / name, overwrite=True):
        _ = 1 / 0
    assert (tmp_path / name / "text").read_text() == "former"
    shutil.copytree(tmp_path / name, tmp_path / f".{name}.97.old")  # as a kill after both renames leaves it
    with whole_folder(tmp_path / name, overwrite=True):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {name, f".{name}.v2.98.old", f".{name}.x.old"}


@pytest.mark.parametrize("folder", ["", ".", "..", "../../work"])
def test_the_current_folder_and_what_holds_it_are_kept(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work" / "inner").mkdir(parents=True)
    (mine := tmp_path / "work" / "inner" / "notes").write_text("mine")
    monkeypatch.chdir(mine.parent)
    with pytest.raises(FileExistsError, match="is the current folder, or holds it"), whole_folder(folder, overwrite=True):
        pass
    assert mine.read_text() == "mine"


def test_of_two_that_make_a_new_folder_the_second_does_not_replace_the_first(tmp_path: Path) -> None:
    """Making a model takes minutes, between the look whether the folder is new and the rename."""
    (tmp_path / "model").mkdir()  # an empty one is new
    context = whole_folder(tmp_path / "model")
    (context.__enter__() / "text").write_text("second")
    (tmp_path / "model" / "text").write_text("first")
    with pytest.raises(OSError, match=r"could not write .*model, .*: Directory not empty"):
        context.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "text").read_text() == "first"
