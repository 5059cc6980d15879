"""Adapters on disk."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_policy import SPECS, make_policy, make_rollouts

from mi_route2.adapters import AdapterSpec, load_adapters, save_adapters
from mi_route2.adapters.store import read_tensors, write_tensors

TOKENS = make_rollouts(4).tokens


def header(path: Path) -> dict[str, object]:
    """A safetensors file's own list of tensors, read from its bytes: eight bytes of length, then JSON."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def test_a_deployed_file_holds_no_quarantine_tensor(spec: AdapterSpec, tmp_path: Path) -> None:
    policy = make_policy(spec)
    save_adapters(policy.adapters, tmp_path / "full.safetensors")
    save_adapters(policy.adapters, tmp_path / "deployed.safetensors", "deployed")
    full, deployed = header(tmp_path / "full.safetensors"), header(tmp_path / "deployed.safetensors")
    assert any(name.startswith("quarantine.") for name in full)
    assert deployed.keys() - {"__metadata__"} == {f"kept.{n}" for n in policy.adapters.kept_parameters()}
    kept = sum(p.numel() * p.element_size() for p in policy.adapters.kept_parameters().values())
    size = (tmp_path / "deployed.safetensors").stat().st_size
    assert size < kept + 8 + len(json.dumps(deployed)) + 512, "bytes that the header does not name"


def test_save_and_load_round_trip(spec: AdapterSpec, tmp_path: Path) -> None:
    policy, other = make_policy(spec), make_policy(spec, scale=0.5, seed=9)
    save_adapters(policy.adapters, tmp_path / "a.safetensors")
    load_adapters(other.adapters, tmp_path / "a.safetensors")
    for name, t in policy.adapters.tensors().items():
        assert torch.equal(other.adapters.tensors()[name], t)
    assert torch.equal(other.model(TOKENS), policy.model(TOKENS))
    assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]


def test_a_deployed_file_fits_a_model_without_a_quarantine(tmp_path: Path) -> None:
    policy = make_policy(SPECS["lora"])
    save_adapters(policy.adapters, tmp_path / "d.safetensors", "deployed")
    bare = make_policy(replace(SPECS["lora"], quarantine="none"), scale=0.0)
    load_adapters(bare.adapters, tmp_path / "d.safetensors")
    with policy.adapters.deployed():
        assert torch.equal(bare.model(TOKENS), policy.model(TOKENS))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", "lacks 1 adapter tensors"),
        ("foreign", "no place for"),
        ("shape", r"has shape \(15,\)"),
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("truncated", "not a whole safetensors file"),
        ("garbage", "not a whole safetensors file"),
        ("empty", "not a whole safetensors file"),
        ("deployed with quarantine", "no place for"),
        ("undeclared", "not a file of adapters"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(change: str, sentence: str, tmp_path: Path) -> None:
    path, policy = tmp_path / "a.safetensors", make_policy(SPECS["svd"])
    save_adapters(policy.adapters, path)
    tensors, meta = read_tensors(path)
    name = "kept.blocks.1.mlp.down.dS"
    if change == "missing":
        del tensors[name]
    elif change == "foreign":
        tensors["kept.blocks.7.mlp.down.dS"] = tensors[name].clone()
    elif change == "shape":
        tensors[name] = tensors[name][:15].clone()
    elif change in ("nan", "inf"):
        tensors[name][3] = float(change)
    elif change == "deployed with quarantine":
        meta["which"] = "deployed"
    elif change == "undeclared":
        meta = {}
    write_tensors(path, tensors, meta)
    if change in ("truncated", "garbage", "empty"):
        data = path.read_bytes()
        path.write_bytes({"truncated": data[:-9], "garbage": b"\x00" * 100, "empty": b""}[change])
    target = make_policy(SPECS["svd"], seed=8)
    before = {n: t.clone() for n, t in target.adapters.tensors().items()}
    with pytest.raises(ValueError, match=sentence):
        load_adapters(target.adapters, path)
    assert all(torch.equal(t, before[n]) for n, t in target.adapters.tensors().items())


@pytest.mark.parametrize(("saved", "loaded"), [("svd", "svd-low"), ("svd", "lora"), ("lora", "lora-shared"), ("lora", "svd")])
def test_adapters_of_another_kind_are_refused(saved: str, loaded: str, tmp_path: Path) -> None:
    save_adapters(make_policy(SPECS[saved]).adapters, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        load_adapters(make_policy(SPECS[loaded]).adapters, tmp_path / "a.safetensors")


def test_a_file_of_another_base_is_refused_unless_that_is_meant(tmp_path: Path) -> None:
    path, trained = tmp_path / "a.safetensors", make_policy(SPECS["lora"])
    save_adapters(trained.adapters, path)
    target = make_policy(SPECS["lora"], scale=0.0)
    with torch.no_grad():
        target.adapters.sites["blocks.1.mlp.down"].weight[0, 0] += 1e-6
    before = {n: t.clone() for n, t in target.adapters.tensors().items()}
    with pytest.raises(ValueError, match="trained on other base weights"):
        load_adapters(target.adapters, path)
    assert all(torch.equal(t, before[n]) for n, t in target.adapters.tensors().items())
    load_adapters(target.adapters, path, any_base=True)
    assert all(torch.equal(t, trained.adapters.tensors()[n]) for n, t in target.adapters.tensors().items())


def test_a_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    adapters = make_policy(SPECS["svd"]).adapters
    with pytest.raises(FileNotFoundError, match="none"):
        load_adapters(adapters, tmp_path / "none.safetensors")
    with pytest.raises(OSError, match="no_such_folder"):
        save_adapters(adapters, tmp_path / "no_such_folder" / "a.safetensors")
