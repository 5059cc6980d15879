"""Exports: stock peft and transformers compute the deployed model from what was written, and no byte of it is the quarantine's."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
from families import FAMILIES, SPECS, TRANSFORMERS, make_family, make_tokens, move
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from mi_route2.adapters import Adapters, AdapterSpec, attach
from mi_route2.adapters.io import PEFT_WARNING, export_merged, export_peft, factors, from_pretrained, places, save_pretrained
from mi_route2.adapters.linear import LoRA, SVDKept
from mi_route2.adapters.svd import decompose
from mi_route2.hosts import HOSTS, open_host
from mi_route2.sites import slots

TOKENS = make_tokens()[0]
FUSED = ("GPT2", "GPTNeoX")
TIED = ("Gemma2", "Gemma3", "GPT2")
"""Families whose unembedding is the embedding, by their configs' own default."""
KINDS = {"svd": SPECS["svd"], "svd-low": SPECS["svd-low"], "lora": SPECS["lora"]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),  # peft, of an adapter at a tied unembedding
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),  # peft, where Conv1D and Linear stand in one model
    pytest.mark.filterwarnings("ignore:the unembedding has an adapter"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def adapted(name: str, spec: AdapterSpec = SPECS["lora"], *patterns: str, dtype: torch.dtype = torch.float64) -> Adapters:
    """Adapters moved off their init on a fresh model of the family."""
    model = make_family(name, dtype)
    return move(attach(model, *(patterns or ("*",)), spec=spec, generator=torch.Generator().manual_seed(7)))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    out = model(TOKENS)
    return out if isinstance(out, Tensor) else out.logits


def deployed(adapters: Adapters) -> Tensor:
    with adapters.deployed():
        return logits(adapters.model)


def with_peft(name: str, folder: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Stock peft on a base of its own."""
    return peft.PeftModel.from_pretrained(make_family(name, dtype), str(folder))


def with_transformers(folder: Path, like: nn.Module, **keywords: Any) -> nn.Module:
    """Stock transformers, with the attention that ``like`` has."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=like.config._attn_implementation, **keywords)


def near(left: Tensor, right: Tensor) -> None:
    tolerance = 1e-12 if left.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def of_peft(path: str) -> tuple[str, str]:
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


# ---- PEFT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["svd-low", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_stock_peft_computes_the_deployed_model(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    adapters = adapted(name, KINDS[kind], dtype=dtype)
    want = deployed(adapters)
    assert (logits(adapters.model) - want).abs().max() > 1e-2, "the quarantine is on, and moves the logits"
    assert (logits(make_family(name, dtype)) - want).abs().max() > 1e-2, "so does the kept adapter"
    export_peft(adapters, tmp_path / "peft")
    near(logits(with_peft(name, tmp_path / "peft", dtype)), want)


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("name", ["GPT2", "Qwen3"])
def test_both_adapters_are_one_lora_that_says_so(name: str, kind: str, tmp_path: Path) -> None:
    adapters = adapted(name, SPECS[kind])
    export_peft(adapters, tmp_path / "full", which="full")
    own = logits(with_peft(name, tmp_path / "full"))
    near(own, logits(adapters.model))
    assert (tmp_path / "full" / PEFT_WARNING).exists() == adapters.has_quarantine == (not torch.allclose(own, deployed(adapters)))


def test_a_lora_is_written_as_it_is_with_scaling_one(tmp_path: Path) -> None:
    adapters = adapted("Qwen3")
    export_peft(adapters, tmp_path / "peft")
    written = tensors_of(tmp_path / "peft")
    for name, slot in slots(adapters.model).items():
        a, b = of_peft(slot.path)
        assert torch.equal(written.pop(a), adapters.sites[name].kept.A)
        assert torch.equal(written.pop(b), adapters.sites[name].kept.B)
    assert not written
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    assert not config["rank_pattern"]
    assert torch.equal(logits(with_peft("Qwen3", tmp_path / "peft")), deployed(adapters)), "bit for bit, then"


@settings(max_examples=40)
@given(d_out=st.integers(1, 6), d_in=st.integers(1, 6), zeros=st.integers(0, 6), seed=st.integers(0, 9))
def test_an_svd_is_a_lora_of_the_rank_that_moved(d_out: int, d_in: int, zeros: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_out, d_in, generator=generator, dtype=torch.float64)
    kept = SVDKept(weight, decompose(weight))
    with torch.no_grad():
        kept.dS += torch.randn(kept.dS.shape, generator=generator, dtype=torch.float64)
        kept.dS[torch.randperm(len(kept.dS), generator=generator)[:zeros]] = 0
    A, B = factors(kept)
    assert A.shape[0] == max(1, int((kept.dS != 0).sum()))
    assert torch.allclose(B @ A, kept.U @ torch.diag(kept.dS) @ kept.Vh, rtol=0, atol=1e-14)


def test_ranks_may_differ_by_module(tmp_path: Path) -> None:
    """Full-rank SVDs of differently shaped weights, some coordinates back at 0, one whole adapter at 0."""
    adapters = adapted("Qwen3", SPECS["svd"])
    with torch.no_grad():
        adapters.sites["blocks.0.attn.q"].kept.dS[2:9] = 0
        adapters.sites["blocks.1.mlp.up"].kept.dS.zero_()
    export_peft(adapters, tmp_path / "peft")
    written = tensors_of(tmp_path / "peft")
    ranks = {site: written[of_peft(slot.path)[0]].shape[0] for site, slot in slots(adapters.model).items()}
    assert ranks == {s: max(1, int((b.kept.dS != 0).sum())) for s, b in adapters.sites.items()}
    assert {ranks["blocks.0.attn.q"], ranks["blocks.1.mlp.up"], ranks["blocks.0.attn.k"], ranks["blocks.1.attn.q"]} == {9, 1, 8, 16}
    loaded = with_peft("Qwen3", tmp_path / "peft")
    assert {m.scaling["default"] for m in loaded.modules() if isinstance(m, peft.tuners.lora.LoraLayer)} == {1.0}
    near(logits(loaded), deployed(adapters))


@pytest.mark.parametrize("pattern", ["blocks.*.attn.k", "blocks.1.attn.[qv]", "blocks.*.attn.*"])
@pytest.mark.parametrize("name", FUSED)
def test_a_part_of_a_fused_linear_moves_its_own_rows_alone(name: str, pattern: str, tmp_path: Path) -> None:
    """Return PEFT's change of the fused weight, read off row by row through the logical Linears of a plain model."""
    adapters = adapted(name, SPECS["lora"], pattern)
    export_peft(adapters, tmp_path / "peft")
    base, loaded = make_family(name), with_peft(name, tmp_path / "peft")
    before = {site: slot.weight.clone() for site, slot in slots(base).items()}
    merged = loaded.merge_and_unload()
    for site, slot in slots(merged).items():
        branch = adapters.sites.get(site)
        if branch is None:
            assert torch.equal(slot.weight, before[site]), site
        else:
            assert torch.allclose(slot.weight, before[site] + branch.kept.delta(), rtol=0, atol=1e-14), site
    counts = {path: len(place.branches) for path, place in places(adapters).items()}
    for path, count in counts.items():
        a = tensors_of(tmp_path / "peft")[of_peft(path)[0]]
        assert a.shape[0] == 4 * count


def test_half_precision_bases_export_factors_in_float32(tmp_path: Path) -> None:
    for kind in ("svd-low", "lora"):
        adapters = adapted("Llama", KINDS[kind], dtype=torch.bfloat16)
        export_peft(adapters, tmp_path / kind)
        written = tensors_of(tmp_path / kind)
        assert {t.dtype for t in written.values()} == {torch.float32}
        kept = adapters.sites["blocks.1.mlp.up"].kept
        a, b = (written[name] for name in of_peft("model.layers.1.mlp.up_proj"))
        exact = kept.B @ kept.A if isinstance(kept, LoRA) else kept.U.float() @ torch.diag(kept.dS) @ kept.Vh.float()
        assert torch.allclose(b @ a, exact, rtol=0, atol=1e-6)
        want = deployed(adapters)
        got = logits(with_peft("Llama", tmp_path / kind, torch.bfloat16))
        assert (got - want).abs().max() < 0.1 < (logits(make_family("Llama", torch.bfloat16)) - want).abs().max()


def test_a_torch_model_without_a_row_exports_under_its_own_paths(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)).double()

    adapters = move(attach(model(), "1", "3", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    export_peft(adapters, tmp_path / "peft")
    near(logits(peft.PeftModel.from_pretrained(model(), str(tmp_path / "peft"))), deployed(adapters))


def on_host(host: str, name: str, spec: AdapterSpec) -> Adapters:
    """The same adapters on any host, the bridge's eager attention everywhere."""
    opened = open_host(host, make_family(name, attn="eager"))
    return move(opened.attach("blocks.*", "unembed", spec=spec, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("kind", ["svd-low", "lora"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "MicroGPT"])
def test_every_host_exports_the_same_lora(name: str, kind: str, tmp_path: Path) -> None:
    for host in HOSTS:
        export_peft(on_host(host, name, KINDS[kind]), tmp_path / host)
    written = {host: tensors_of(tmp_path / host) for host in HOSTS}
    for host in HOSTS:
        assert written[host].keys() == written["torch"].keys()
        assert all(torch.allclose(t, written["torch"][key], rtol=0, atol=1e-12) for key, t in written[host].items())
        config, own = (json.loads((tmp_path / h / "adapter_config.json").read_text()) for h in (host, "torch"))
        assert {**config, "target_modules": sorted(config["target_modules"])} == {
            **own,
            "target_modules": sorted(own["target_modules"]),
        }


# ---- merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["svd", "lora"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_stock_transformers_computes_the_deployed_model(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    adapters = adapted(name, KINDS[kind], "blocks.*", dtype=dtype)
    want, all_on = deployed(adapters), logits(adapters.model)
    live = {key: (t.data_ptr(), t.clone()) for key, t in adapters.model.state_dict().items()}
    config, drawn = copy.deepcopy(adapters.model.config.to_dict()), torch.get_rng_state()

    export_merged(adapters, tmp_path / "merged")
    loaded = with_transformers(tmp_path / "merged", adapters.model)
    assert loaded.dtype == dtype
    near(logits(loaded), want)

    assert all(t.data_ptr() == live[key][0] and torch.equal(t, live[key][1]) for key, t in adapters.model.state_dict().items())
    assert adapters.model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(logits(adapters.model), all_on)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_merged_checkpoint_has_the_files_and_names_of_the_base(name: str, tmp_path: Path) -> None:
    """And what carries no adapter is the base's, bit for bit: with the embedding tied where it was."""
    base, adapters = make_family(name), adapted(name, SPECS["lora"], "blocks.*.mlp.*")
    for model in (base, adapters.model):
        model.generation_config.update(do_sample=True, temperature=0.5)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    base.save_pretrained(tmp_path / "base")
    export_merged(adapters, tmp_path / "merged")
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {p.name for p in (tmp_path / "base").iterdir()}
    left, right = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    assert left.keys() == right.keys()
    assert all(torch.equal(t, right[key]) != (".mlp." in key and key.endswith("weight")) for key, t in left.items())
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / file).read_text()) == json.loads((tmp_path / "base" / file).read_text())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_adapter_at_the_unembedding_leaves_the_embedding_alone(name: str, tmp_path: Path) -> None:
    adapters = adapted(name, SPECS["lora"], "unembed")
    if name in TIED:
        with pytest.warns(UserWarning, match="shares its weight with the embedding"):
            export_merged(adapters, tmp_path / "merged")
    else:
        export_merged(adapters, tmp_path / "merged")
    loaded = with_transformers(tmp_path / "merged", adapters.model)
    near(logits(loaded), deployed(adapters))
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(loaded.get_input_embeddings().weight, make_family(name).get_input_embeddings().weight)
    assert adapters.model.config.tie_word_embeddings == (name in TIED)


def test_what_is_no_transformers_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MicroGPT cannot be written as a transformers checkpoint.*use export_peft"):
        export_merged(adapted("MicroGPT"), tmp_path / "merged")
    assert not list(tmp_path.iterdir())


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_linear_that_computes_more_than_a_matmul_is_not_merged_into_a_file(tmp_path: Path) -> None:
    """It would multiply what the adapter adds as well; a LoRA stands beside it."""
    model = make_family("Llama")
    before = model.get_submodule("model.layers.1.mlp.up_proj")
    doubled = Doubled(before.in_features, before.out_features).double()  # pyright: ignore
    model.set_submodule("model.layers.1.mlp.up_proj", doubled)
    adapters = move(attach(model, "blocks.*.mlp.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(7)))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj computes more than a matmul \(Doubled\)"):
        export_merged(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    export_peft(adapters, tmp_path / "lora")


# ---- what the stock library would read as another model


class TiedLlama(LlamaForCausalLM):
    """Every model of its class ties two modules."""

    _tied_weights_keys: ClassVar[Any] = {"model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight"}


def written(model: nn.Module, *patterns: str) -> Adapters:
    return move(attach(model, *patterns, spec=AdapterSpec("lora", rank=2), generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("pattern", ["blocks.0.mlp.up", "*.mlp.up", "*.attn.q"])
@pytest.mark.parametrize("shared", ["mlp.up_proj", "input_layernorm"])
def test_two_modules_with_one_weight_are_merged_apart(shared: str, pattern: str, tmp_path: Path) -> None:
    model = make_family("Llama")
    first, second = (model.get_submodule(f"model.layers.{layer}.{shared}") for layer in (0, 1))
    second.weight = first.weight
    adapters = written(model, pattern)
    export_merged(adapters, tmp_path / "merged")
    near(logits(with_transformers(tmp_path / "merged", model, dtype=torch.float64)), deployed(adapters))


def test_what_a_class_ties_is_not_merged_apart_but_exported_as_a_lora(tmp_path: Path) -> None:
    config = make_family("Llama").config
    config.tie_word_embeddings = True
    adapters = written(TiedLlama(config).double().eval(), "*.mlp.up")
    with pytest.raises(ValueError, match=r"the merged checkpoint is not what was trained: .* use export_peft"):
        export_merged(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    export_peft(adapters, tmp_path / "lora")


@pytest.mark.parametrize("name", ["down_proj", "gate_proj"])
def test_adapters_that_no_forward_calls_are_not_merged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model multiplies by the weight itself, so that the deployed model is the base."""

    def times(layer: nn.Module, x: Tensor, past: bool) -> Tensor:
        return functional.linear(x, layer.weight) if past else layer(x)  # pyright: ignore

    def forward(self: Any, x: Tensor) -> Tensor:
        gated = self.act_fn(times(self.gate_proj, x, name == "gate_proj")) * self.up_proj(x)
        return times(self.down_proj, gated, name == "down_proj")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    adapters = written(make_family("Llama"), "*.attn.q", f"*.mlp.{name[:4]}")
    with pytest.raises(ValueError, match="the merged checkpoint is not what was trained"):
        export_merged(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_linear_that_peft_does_not_adapt_is_refused_with_what_is_exact(tmp_path: Path) -> None:
    """The ``out_proj`` of Mamba."""
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=1)).double().eval()
    adapters = written(model, "*.out_proj")
    with pytest.raises(ValueError, match=r"^peft cannot read what was written \(.*out_proj.* use export_merged$"):
        export_peft(adapters, tmp_path / "lora")
    export_merged(adapters, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


# ---- all formats: the quarantine, switches, whole or nothing

Export = Callable[..., None]
FORMATS: dict[str, Export] = {"peft": export_peft, "merged": export_merged, "pretrained": save_pretrained}
formats = pytest.mark.parametrize("export", FORMATS.values(), ids=FORMATS)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@formats
@pytest.mark.parametrize("spec", ["svd", "lora", "lora-shared", "svd-shared"])
def test_no_byte_depends_on_the_quarantine(export: Export, spec: str, tmp_path: Path) -> None:
    adapters = adapted("GPTNeoX", SPECS[spec])
    export(adapters, tmp_path / "one")
    with torch.no_grad():
        for i, p in enumerate(adapters.quarantine_parameters().values()):
            p.copy_(torch.full_like(p, 100.0 + i))
    export(adapters, tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    for path in (tmp_path / "one").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert not [name for name in file.keys() if "quarantine" in name]  # noqa: SIM118


@formats
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_written(export: Export, value: float, tmp_path: Path) -> None:
    adapters = adapted("Qwen3")
    with torch.no_grad():
        adapters.sites["blocks.1.mlp.up"].kept.B[0, 0] = value
    with pytest.raises(ValueError, match=r"kept\.blocks\.1\.mlp\.up\.B holds values that are not finite"):
        export(adapters, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@formats
def test_a_folder_that_holds_something_is_replaced_only_when_told(export: Export, tmp_path: Path) -> None:
    adapters, target = adapted("Qwen3"), tmp_path / "deep" / "out"
    export(adapters, target)
    (target / "notes.txt").write_text("mine")
    before = bytes_of(tmp_path)
    with pytest.raises(FileExistsError, match=r"is not empty.*overwrite=True"):
        export(adapters, target)
    with pytest.raises(FileExistsError, match="is a file"):
        export(adapters, target / "notes.txt", overwrite=True)
    assert bytes_of(tmp_path) == before
    export(adapters, target, overwrite=True)
    assert before.pop("deep/out/notes.txt") == b"mine"
    assert bytes_of(tmp_path) == before
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_an_export_says_who_reads_it(tmp_path: Path) -> None:
    adapters = adapted("Qwen3")
    export_peft(adapters, tmp_path / "peft")
    with pytest.raises(FileNotFoundError, match=r"no route2_adapters\.safetensors.*peft\.PeftModel\.from_pretrained"):
        from_pretrained(make_family("Qwen3"), tmp_path / "peft")
