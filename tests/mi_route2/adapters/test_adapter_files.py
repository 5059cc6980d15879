"""Adapters on disk."""

import copy
import functools
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import families
import pytest
import scipy.linalg
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_policy import SPECS, make_model, make_policy, make_rollouts

from mi_route2.adapters import Adapters, AdapterSpec, attach, load_adapters, save_adapters
from mi_route2.adapters.io import (
    TENSORS,
    from_pretrained,
    save_pretrained,
)
from mi_route2.adapters.linear import RoutedLinear
from mi_route2.adapters.svd import SVD, _keep, weight_hash
from mi_route2.hosts import HOSTS, open_host
from mi_route2.sites import select
from mi_route2.tensor_files import HEADER, read_tensors, write_tensors

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


NAME = "kept.blocks.1.mlp.down.dS"
MISFITS: dict[str, tuple[Callable[[dict[str, torch.Tensor], dict[str, str]], object], str]] = {
    "missing": (lambda tensors, _: tensors.pop(NAME), "lacks 1 adapter tensors"),
    "foreign": (lambda tensors, _: tensors.update({"kept.blocks.7.mlp.down.dS": torch.ones(16)}), "the model does not have"),
    "shape": (lambda tensors, _: tensors.update({NAME: tensors[NAME][:15].clone()}), r"has shape \(15,\)"),
    "nan": (lambda tensors, _: tensors[NAME][3:4].fill_(torch.nan), "not finite"),
    "inf": (lambda tensors, _: tensors[NAME][3:4].fill_(torch.inf), "not finite"),
    "deployed with quarantine": (lambda _, meta: meta.update(which="deployed"), "the model does not have"),
    "undeclared": (lambda _, meta: meta.clear(), "not an adapter file"),
    "format": (lambda _, meta: meta.update(format="mi-route2 adapters 9"), "not an adapter file"),
    "type": (
        lambda tensors, _: tensors.update({NAME: tensors[NAME].float()}),
        r"down\.dS is torch\.float32 in .*a\.safetensors, but torch\.float64 in the model",
    ),
    "integers": (lambda tensors, _: tensors.update({NAME: tensors[NAME].long()}), r"is torch\.int64 in"),
    "which": (lambda _, meta: meta.update(which="some"), "which='some' is neither"),
    "header": (lambda _, meta: meta.update(note="mine"), "lacks or adds 'note'"),
    "no base_hash": (lambda _, meta: meta.pop("base_hash"), "lacks or adds 'base_hash'"),
}
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-9],
    "garbage": lambda _: b"\x00" * 100,
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("change", [*MISFITS, *BROKEN])
def test_a_file_that_does_not_fit_changes_nothing(change: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapters(make_policy(SPECS["svd"]).adapters, path)
    if change in BROKEN:
        sentence = "not a complete safetensors file"
        path.write_bytes(BROKEN[change](path.read_bytes()))
    else:
        (apply, sentence), (tensors, meta) = MISFITS[change], read_tensors(path)
        apply(tensors, meta)
        write_tensors(path, tensors, meta)
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


def test_another_type_of_number_is_converted_only_when_that_is_meant(tmp_path: Path) -> None:
    path, trained = tmp_path / "a.safetensors", make_policy(SPECS["lora"])
    save_adapters(trained.adapters, path)
    tensors, meta = read_tensors(path)
    write_tensors(path, {name: t.float() for name, t in tensors.items()}, meta)
    target = make_policy(SPECS["lora"], scale=0.0)
    with pytest.raises(ValueError, match=r"is torch\.float32 in .* any_base=True to convert"):
        load_adapters(target.adapters, path)
    load_adapters(target.adapters, path, any_base=True)
    own = trained.adapters.tensors()
    assert all(torch.equal(t, own[n].float().double()) for n, t in target.adapters.tensors().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("adapter", ["kept", "quarantine"])
def test_what_could_not_be_loaded_is_not_saved(adapter: str, value: float, tmp_path: Path) -> None:
    policy, path = make_policy(SPECS["lora"]), tmp_path / "a.safetensors"
    save_adapters(policy.adapters, path)
    before = path.read_bytes()
    with torch.no_grad():
        getattr(policy.adapters, f"{adapter}_parameters")()["blocks.0.attn.q.B"][0, 0] = value
    with pytest.raises(ValueError, match=rf"^{adapter}\.blocks\.0\.attn\.q\.B holds values that are not finite"):
        save_adapters(policy.adapters, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    if adapter == "quarantine":  # which is no part of what is deployed
        save_adapters(policy.adapters, path, "deployed")


def test_a_file_of_another_spec_is_refused_even_if_its_tensors_fit(tmp_path: Path) -> None:
    """With a checksum and without."""
    path, policy = tmp_path / "a.safetensors", make_policy(SPECS["svd"])
    save_adapters(policy.adapters, path)
    tensors, meta = read_tensors(path)
    for change in ({"quarantine_rank": 9}, {"rank": 16}, {"kept": "lora", "rank": 4}):
        meta["spec"] = json.dumps({**asdict(SPECS["svd"]), **change})
        write_tensors(path, tensors, meta)
        name, value = next(iter(change.items()))
        with pytest.raises(ValueError, match=rf"holds adapters with {name}={value!r}, but these have {name}="):
            load_adapters(policy.adapters, path)
        save_file(tensors, path, metadata={HEADER: json.dumps(meta)})
        with pytest.raises(ValueError, match=rf"holds adapters with {name}={value!r}"):
            load_adapters(policy.adapters, path, unchecked=True)
    for text in ("null", "{", "{}x", json.dumps({"kept": "svd", "depth": 3}), '{"kept":' + "[" * 100_000):
        write_tensors(path, tensors, {**meta, "spec": text})
        with pytest.raises(ValueError, match="has no valid adapter spec in its header"):
            load_adapters(policy.adapters, path)


@pytest.mark.parametrize("host", HOSTS)
def test_a_transformers_model_with_adapters_does_not_save_itself(host: str, tmp_path: Path) -> None:
    """It would be read back without its adapted weights. Once they are detached it does, and is the base."""
    model: Any = families.make_family("Llama", torch.float32)
    base = {name: t.clone() for name, t in model.state_dict().items()}
    on = open_host(host, model).attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    for save in (model.save_pretrained, model.model.save_pretrained, model.push_to_hub):
        with pytest.raises(RuntimeError, match=r"use export_merged\(adapters, folder\) .* export_peft\(adapters, folder\)"):
            save(str(tmp_path / "a"))
    assert not list(tmp_path.iterdir())
    on.detach()
    if host != "transformer_lens":  # which has rewritten the model
        model.save_pretrained(tmp_path / "a")
        found = type(model).from_pretrained(tmp_path / "a").state_dict()
        assert all(torch.equal(t, base[name]) for name, t in found.items())


@pytest.mark.parametrize("host", HOSTS)
def test_a_vocabulary_is_not_resized_under_an_adapter_at_the_unembedding(host: str) -> None:
    model: Any = families.make_family("Llama", torch.float32)
    there, size = open_host(host, model), families.VOCAB
    on = there.attach("blocks.*", "unembed", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    for resize in (model.resize_token_embeddings, model.model.resize_token_embeddings):
        with pytest.raises(RuntimeError, match=r"adapters\.detach\(\), resize, and attach again"):
            resize(size + 8)
    on.detach()
    if host != "transformer_lens":
        assert model.resize_token_embeddings(size + 8, mean_resizing=False).num_embeddings == size + 8


def flip(path: Path, whole: bytes, bit: int) -> None:
    byte, place = divmod(bit % (8 * len(whole)), 8)
    path.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << place)]) + whole[byte + 1 :])


ONCE = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def written() -> tuple[bytes, Adapters, dict[str, torch.Tensor]]:
    """A file's bytes, adapters that it would fit, and what they hold before it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        save_adapters(make_policy(SPECS["svd"]).adapters, Path(folder) / "a")
        whole = (Path(folder) / "a").read_bytes()
    target = make_policy(SPECS["svd"], seed=8).adapters
    return whole, target, {name: t.clone() for name, t in target.tensors().items()}


@ONCE
@given(bit=st.integers(0, 2**40), in_header=st.booleans())
def test_one_flipped_bit_anywhere_is_an_error(bit: int, in_header: bool, tmp_path: Path) -> None:
    whole, target, before = written()
    (length,) = struct.unpack("<Q", whole[:8])
    start, count = (0, 8 + length) if in_header else (8 + length, len(whole) - 8 - length)
    flip(tmp_path / "a.safetensors", whole, 8 * start + bit % (8 * count))
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        load_adapters(target, tmp_path / "a.safetensors")
    assert all(torch.equal(t, before[name]) for name, t in target.tensors().items())


# ---- a folder: save_pretrained, from_pretrained


def same(left: Adapters, right: Adapters, *, quarantine: bool) -> bool:
    a, b = left.tensors(quarantine=quarantine), right.tensors()
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def test_a_folder_attaches_and_loads_in_one_step(spec: AdapterSpec, tmp_path: Path) -> None:
    policy = make_policy(spec)
    save_pretrained(policy.adapters, tmp_path / "kept")
    save_pretrained(policy.adapters, str(tmp_path / "all"), "full")
    kept, everything = make_model(), make_model()
    on_kept, on_all = from_pretrained(kept, tmp_path / "kept"), from_pretrained(everything, str(tmp_path / "all"))
    assert same(policy.adapters, on_kept, quarantine=False)
    assert same(policy.adapters, on_all, quarantine=True)
    assert not on_kept.quarantine_parameters()
    assert on_kept.spec == replace(spec, quarantine="none")
    assert on_all.spec == spec
    assert torch.equal(everything(TOKENS), policy.model(TOKENS))
    with policy.adapters.deployed():
        assert torch.equal(kept(TOKENS), policy.model(TOKENS))
    names = header(tmp_path / "kept" / TENSORS).keys() - {"__metadata__"}
    assert names == {f"kept.{name}" for name in policy.adapters.kept_parameters()}


@pytest.mark.parametrize("loaded", HOSTS)
@pytest.mark.parametrize("saved", HOSTS)
@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "GPTNeoX"])
def test_a_folder_from_one_host_loads_on_every_other(name: str, saved: str, loaded: str, tmp_path: Path) -> None:
    for spec in ("svd-low", "lora"):
        source = open_host(saved, families.make_family(name, attn="eager"))
        drawn = torch.Generator().manual_seed(7)
        adapters = families.move(source.attach("blocks.*", spec=families.SPECS[spec], generator=drawn))
        save_pretrained(adapters, tmp_path / spec)
        target = open_host(loaded, families.make_family(name, attn="eager"))
        found = from_pretrained(target, tmp_path / spec)
        assert same(adapters, found, quarantine=False)
        assert found.base_hash == adapters.base_hash
        with adapters.deployed(), torch.no_grad():
            tolerance = 1e-6 if name == "GPTNeoX" and "transformer_lens" in (saved, loaded) else 1e-10
            tokens = families.make_tokens()[0]
            assert torch.allclose(target.logits(tokens), source.logits(tokens), rtol=0, atol=tolerance)


def by_another_lapack(model: torch.nn.Module, cache_dir: Path) -> Path:
    """The SVDs of a machine with other routines, where ``cache_dir`` has them: LAPACK's gesvd in place of its gesdd."""
    for slot in select(model, "blocks.*").values():
        U, S, Vh = (torch.from_numpy(part) for part in scipy.linalg.svd(slot.weight.detach().numpy(), False, lapack_driver="gesvd"))
        sign = Vh.gather(1, Vh.abs().argmax(dim=1, keepdim=True)).sign()
        key = weight_hash(slot.weight)
        _keep(cache_dir / f"svd-{key[:32]}.safetensors", key, SVD((U * sign.mT).contiguous(), S.clone(), (Vh * sign).contiguous()))
    return cache_dir


def test_singular_vectors_that_come_out_otherwise_are_refused(tmp_path: Path) -> None:
    """Of a weight with equal singular values, the file's ``dS`` would be another adapter on another machine, in silence."""
    outcomes = []
    for name in ("usual", "degenerate"):
        model = families.make_family("Llama")
        if name == "degenerate":
            torch.nn.init.orthogonal_(model.get_parameter("model.layers.1.self_attn.q_proj.weight"), generator=torch.Generator())
        base, there = copy.deepcopy(model), by_another_lapack(model, tmp_path / f"svds of {name}")
        adapters = attach(model, "blocks.*", spec=SPECS["svd"], generator=torch.Generator())
        save_pretrained(families.move(adapters), tmp_path / name)
        outcomes.append((from_pretrained(copy.deepcopy(base), tmp_path / name).tensors(), adapters.tensors(quarantine=False)))
        if name == "usual":
            found = from_pretrained(base, tmp_path / name, cache_dir=there)
            with adapters.deployed(), torch.no_grad():
                tokens = families.make_tokens()[0]
                torch.testing.assert_close(found.model(tokens).logits, model(tokens).logits, rtol=1e-8, atol=1e-8)
        else:
            with pytest.raises(
                ValueError, match=r"singular vectors of blocks\.1\.attn\.q differ from those where .* pass a cache_dir"
            ):
                from_pretrained(base, tmp_path / name, cache_dir=there)
            assert not [m for m in base.modules() if isinstance(m, RoutedLinear)]
            from_pretrained(base, tmp_path / name, cache_dir=there, any_base=True)
    assert all(torch.equal(t, expected[key]) for own, expected in outcomes for key, t in own.items())


def replace_header(folder: Path, header: str | None) -> None:
    """In the tensor file, with a checksum in the config that fits."""
    tensors, _ = read_tensors(folder / TENSORS)
    save_file(tensors, folder / TENSORS, metadata=None if header is None else {HEADER: header})


def change_a_weight(folder: Path) -> None:
    flip(folder / TENSORS, (folder / TENSORS).read_bytes(), -3)


FAULTS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no tensors": (lambda f: (f / TENSORS).unlink(), FileNotFoundError, "has no route2_adapters.safetensors"),
    "flipped byte": (change_a_weight, ValueError, "is damaged: its content"),
    "no header": (lambda f: replace_header(f, None), ValueError, "has no checksum"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_fit_leaves_the_model_as_it_was(fault: str, tmp_path: Path) -> None:
    break_it, error, sentence = FAULTS[fault]
    save_pretrained(make_policy(SPECS["lora"]).adapters, tmp_path / "a")
    break_it(tmp_path / "a")
    assert_refused(make_model(), tmp_path / "a", error, sentence)


def assert_refused(model: torch.nn.Module, folder: Path, error: type[Exception], sentence: str) -> None:
    next(model.parameters()).requires_grad_(False)
    before = {name: (p, p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(error, match=sentence):
        from_pretrained(model, folder)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[n] is p and torch.equal(p, value) and p.requires_grad == grad for n, (p, value, grad) in before.items())
    assert not [m for m in model.modules() if isinstance(m, RoutedLinear)]


def test_sites_of_a_model_without_a_row_are_read_as_names_not_patterns(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"a[b]": torch.nn.Linear(3, 3), "ab": torch.nn.Linear(3, 3)})

    adapters = attach(
        model(), "a[[]b]", spec=AdapterSpec(kept="lora", rank=2, quarantine="none"), generator=torch.Generator().manual_seed(0)
    )
    save_pretrained(adapters, tmp_path / "a")
    assert list(from_pretrained(model(), tmp_path / "a").sites) == ["a[b]"]


@pytest.mark.parametrize("after", [torch.bfloat16, torch.float16, torch.float64])
def test_adapters_of_a_model_that_is_cast_keep_their_type_and_load(spec: AdapterSpec, after: torch.dtype, tmp_path: Path) -> None:
    """For an SVD the vectors are those of the weights in the new type."""
    model, generator = make_model(torch.float32), torch.Generator().manual_seed(1)
    adapters = attach(model, "blocks.*", spec=spec, generator=generator)
    parameters = [*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()]
    model.to(after)
    assert {p.dtype for p in adapters.tensors().values()} == {torch.float64 if after == torch.float64 else torch.float32}
    with torch.no_grad():
        for p in parameters:  # those that an optimizer may have got before
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    save_pretrained(adapters, tmp_path / "saved", "full")
    again = from_pretrained(make_model(torch.float32).to(after), tmp_path / "saved")
    assert torch.equal(model(TOKENS), again.model(TOKENS))
