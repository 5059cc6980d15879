"""Adapters on disk, and the SVD coordinates that they are written in."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_policy import SPECS, make_policy, make_rollouts

from mi_route2.adapters import AdapterSpec, attach, load_adapters, save_adapters
from mi_route2.adapters import svd as svd_module
from mi_route2.adapters.store import read_tensors, write_tensors
from mi_route2.adapters.svd import decompose, weight_hash

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


# ---- SVD coordinates


@given(d_out=st.integers(1, 12), d_in=st.integers(1, 12), seed=st.integers(0, 99), rank_one=st.booleans())
def test_decompose_is_a_signed_svd_of_any_shape(d_out: int, d_in: int, seed: int, rank_one: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_out, d_in, generator=generator, dtype=torch.float64)
    if rank_one:
        weight = weight[:, :1] @ weight[:1]
    svd, r = decompose(weight), min(d_out, d_in)
    eye = torch.eye(r, dtype=torch.float64)
    assert svd.U.shape == (d_out, r)
    assert svd.Vh.shape == (r, d_in)
    assert torch.allclose(svd.U @ svd.S.diag() @ svd.Vh, weight, rtol=0, atol=1e-12)
    assert torch.allclose(svd.U.T @ svd.U, eye, rtol=0, atol=1e-12)
    assert torch.allclose(svd.Vh @ svd.Vh.T, eye, rtol=0, atol=1e-12)
    assert (svd.S[:-1] >= svd.S[1:]).all()
    peak = svd.Vh.abs().argmax(dim=1)
    assert (svd.Vh[torch.arange(r), peak] > 0).all()
    top = svd.top(1)
    assert torch.equal(top.U, svd.U[:, :1])
    assert torch.equal(top.Vh, svd.Vh[:1])


def test_ranks_outside_the_weight_are_refused() -> None:
    svd = decompose(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    for rank in (0, 5, -1):
        with pytest.raises(ValueError, match=r"outside 1\.\.4"):
            svd.top(rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_hit_is_the_miss_bit_for_bit(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    miss = decompose(weight, tmp_path / "new" / "folder")
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: pytest.fail("a hit must not compute"))
    hit = decompose(weight, tmp_path / "new" / "folder")
    for name in ("U", "S", "Vh"):
        assert torch.equal(getattr(hit, name), getattr(miss, name))
        assert getattr(hit, name).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_hash_tells_shape_type_and_content_apart() -> None:
    w = torch.zeros(4, 6)
    variants = [w, w.view(6, 4), w.double(), w.index_fill(0, torch.tensor([1]), 1e-30), w.bfloat16()]
    assert len({weight_hash(v) for v in variants}) == len(variants)
    assert weight_hash(torch.arange(6.0).view(2, 3)) != weight_hash(torch.arange(6.0).view(3, 2).mT)
    assert weight_hash(torch.arange(6.0).view(3, 2).mT) == weight_hash(torch.arange(6.0).view(3, 2).mT.contiguous())


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "no S", "other shape", "flipped", "nan", "other weight"])
def test_a_damaged_cache_file_is_computed_anew_and_replaced(damage: str, tmp_path: Path) -> None:
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sound = decompose(weight, tmp_path)
    (path,) = tmp_path.iterdir()
    data, tensors = path.read_bytes(), load_file(path)
    match damage:
        case "no S":
            del tensors["S"]
        case "other shape":
            tensors["U"] = tensors["U"][:, :3].clone()
        case "flipped":
            tensors["Vh"][2, 4] += 0.1
        case "nan":
            tensors["S"][1] = float("nan")
        case "other weight":
            other = decompose(weight.flip(0) * 2)
            tensors = {"U": other.U, "S": other.S, "Vh": other.Vh}
    save_file(tensors, path)
    if damage in ("empty", "truncated", "garbage"):
        path.write_bytes({"empty": b"", "truncated": data[:-5], "garbage": b"\xff" * 64}[damage])
    again = decompose(weight, tmp_path)
    assert torch.equal(again.U, sound.U)
    assert torch.equal(again.Vh, sound.Vh)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_attach_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_policy import make_model

    first = attach(make_model(), "blocks.*", generator=torch.Generator(), cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 12
    monkeypatch.setattr(svd_module.torch.linalg, "svd", lambda *a, **k: pytest.fail("a hit must not compute"))
    again = attach(make_model(), "blocks.*", generator=torch.Generator(), cache_dir=tmp_path)
    for site, module in first.sites.items():
        assert torch.equal(module.kept.U, again.sites[site].kept.U)  # pyright: ignore
