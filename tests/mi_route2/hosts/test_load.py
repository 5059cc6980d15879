"""Loading: a checkpoint's folder or a cached id, on any host, is the model that was saved; any other is refused in one sentence."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from families import SPECS, TRANSFORMERS, make_family, make_tokens, move
from offline import unreached
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from mi_route2.adapters import attach
from mi_route2.adapters.io import export_merged, export_peft, from_pretrained, save_pretrained
from mi_route2.hosts import HOSTS
from mi_route2.hosts.base import Host
from mi_route2.hosts.load import load

TOKENS = make_tokens()[0]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offline, as ``HF_HUB_OFFLINE=1`` makes it at import; and nobody even tries."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with unreached():
        yield


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen"
    make_family("Qwen3").save_pretrained(folder)
    return folder


def attention(name: str, host: str = "torch") -> str:
    """The bridge is eager always; Gemma2 has none of torch's."""
    return "eager" if host == "transformer_lens" or name == "Gemma2" else "sdpa"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_saved_family_loads_as_it_was(name: str, tmp_path: Path) -> None:
    model = make_family(name, attn=attention(name))
    model.save_pretrained(tmp_path / "checkpoint")
    host = load(tmp_path / "checkpoint", attn=attention(name))
    assert isinstance(host, Host)
    assert not host.model.training
    assert host.model.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in host.model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(host.logits(TOKENS), model(TOKENS).logits)


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_loads_the_same_model(host: str, qwen: Path) -> None:
    loaded = load(str(qwen), host=host, attn=attention("Qwen3", host))
    assert loaded.name == host
    with torch.no_grad():
        want = make_family("Qwen3", attn=attention("Qwen3", host))(TOKENS).logits
        assert torch.allclose(loaded.logits(TOKENS), want, rtol=0, atol=1e-10)


def test_type_device_and_attention_are_what_is_asked_for(qwen: Path) -> None:
    default = load(qwen).model
    assert {p.dtype for p in default.parameters()} == {torch.float64}, "the checkpoint's own"
    asked = load(qwen, dtype=torch.bfloat16, device="cpu", attn="eager").model
    assert {p.dtype for p in asked.parameters()} == {torch.bfloat16}
    assert asked.config._attn_implementation == "eager"
    assert load(qwen, dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("which", ["deployed", "full"])
def test_adapters_come_along(host: str, which: str, qwen: Path, tmp_path: Path) -> None:
    source = load(qwen, host=host, attn=attention("Qwen3", host))
    adapters = move(source.attach("blocks.*", spec=SPECS["svd-low"], generator=torch.Generator().manual_seed(0)))
    save_pretrained(adapters, tmp_path / "a", which)
    loaded = load(qwen, host=host, attn=attention("Qwen3", host), adapters=tmp_path / "a")
    with torch.no_grad(), adapters.full() if which == "full" else adapters.deployed():
        assert torch.equal(loaded.logits(TOKENS), source.logits(TOKENS))
    if which == "full":
        with torch.no_grad(), adapters.deployed():
            assert not torch.allclose(loaded.logits(TOKENS), source.logits(TOKENS), atol=1e-3), "the quarantine is in"


def test_a_merged_export_loads_on_every_host(qwen: Path, tmp_path: Path) -> None:
    model = make_family("Qwen3", attn="eager")
    adapters = move(attach(model, "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0)))
    export_merged(adapters, tmp_path / "merged")
    with torch.no_grad(), adapters.deployed():
        want = model(TOKENS).logits
    for host in HOSTS:
        with torch.no_grad():
            got = load(tmp_path / "merged", host=host, attn="eager").logits(TOKENS)
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


# ---- ids and the cache


def cached(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay ``folder`` out as the hub's cache does for the id owner/name."""
    repo = cache / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def test_a_cached_id_loads_offline(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path / "cache", qwen, monkeypatch)
    with torch.no_grad():
        assert torch.equal(load("owner/name").logits(TOKENS), make_family("Qwen3")(TOKENS).logits)


def test_a_cached_id_with_pickled_weights_is_refused(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(qwen, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    cached(tmp_path / "cache", tmp_path / "pickled", monkeypatch)
    with pytest.raises(FileNotFoundError, match="its config or safetensors are not in the Hugging Face cache"):
        load("owner/name")


def test_a_cached_id_with_an_adapter_of_peft_is_refused(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")  # without it transformers leaves the adapter out
    shutil.copytree(qwen, tmp_path / "both")
    peft_beside(tmp_path / "both")
    cached(tmp_path / "cache", tmp_path / "both", monkeypatch)
    with pytest.raises(ValueError, match=r"owner/name has an adapter_config\.json beside its checkpoint"):
        load("owner/name")


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "no such name!"])
def test_an_id_that_is_not_cached_names_both_remedies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"is not a folder, .* path of a checkpoint's folder, or run `hf download"):
        load(name)


# ---- what is refused, and how


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def t5(folder: Path) -> None:
    shutil.rmtree(folder)
    config = T5Config(vocab_size=50, d_model=8, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def own_code(folder: Path) -> None:
    edit(
        folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    )
    (folder / "configuration_mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def sharded(folder: Path, index: str) -> None:
    make_family("Qwen3").save_pretrained(folder, max_shard_size="6KB")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)


def peft_beside(folder: Path) -> None:
    adapters = attach(make_family("Qwen3"), "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    export_peft(adapters, folder / "lora")
    for file in (folder / "lora").iterdir():
        file.replace(folder / file.name)


LAST = "model.layers.1.mlp.down_proj.weight"
KNOWN = "choose a causal language model that transformers knows, such as Qwen2ForCausalLM"
FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "has no config.json"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        FileNotFoundError,
        "has no weights: it has neither a model.safetensors",
    ),
    "pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ValueError,
        "its weights only in pytorch_model.bin; pickled",
    ),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ValueError, "not a valid JSON file"),
    "empty config": (lambda f: (f / "config.json").write_text("{}"), ValueError, KNOWN),
    "misfit config": (lambda f: edit(f, num_hidden_layers=3), ValueError, "config of .* is not valid"),
    "unknown type": (lambda f: edit(f, model_type="wonder"), ValueError, f"does not know the architecture of .*{KNOWN}"),
    "encoder-decoder": (t5, ValueError, f"is a T5: {KNOWN}"),
    "no language model": (lambda f: edit(f, model_type="clip"), ValueError, KNOWN),
    "own code": (own_code, ValueError, f"needs its own code for its architecture, which is not run: {KNOWN}"),
    "adapter of PEFT": (peft_beside, ValueError, "has an adapter_config.json beside its checkpoint"),
    "broken index": (
        lambda f: sharded(f, "{"),
        ValueError,
        r"JSON file of .* does not fit its weights, or is damaged \(JSONDecode",
    ),
    "empty index": (lambda f: sharded(f, "{}"), ValueError, r"JSON file of .* \(KeyError: 'weight_map'\); copy it again"),
    "no activation": (lambda f: edit(f, hidden_act="wonder"), ValueError, r"JSON file of .* \(KeyError: 'wonder'\)"),
    "cut off": (cut, ValueError, "not complete safetensors"),
    "lacking": (
        lambda f: tensors(f, lambda t: t.pop(LAST)),
        ValueError,
        f"lacks 1 weights that its config asks for, first '{LAST}'",
    ),
    "shape": (lambda f: edit(f, intermediate_size=20), ValueError, "6 weights of other shapes than its config says, first"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_had_says_why(fault: str, qwen: Path, tmp_path: Path) -> None:
    break_it, error, sentence = FAULTS[fault]
    folder = tmp_path / "checkpoint"
    shutil.copytree(qwen, folder)
    break_it(folder)
    with pytest.raises(error, match=sentence) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "checkpoint" in str(caught.value), "it names the folder"
    assert not (folder / "ran").exists()


def test_paths_that_are_none(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "none", str(tmp_path / "none"), "./none", "~/none/here", "a/b/c", "none/", Path("none")):
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*none|there is no folder a/b/c"):
            load(path)
    with pytest.raises(ValueError, match=r"config\.json is a file: give the folder"):
        load(qwen / "config.json")


def test_the_host_is_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown host 'jax': choose from torch, transformer_lens, nnsight"):
        load(tmp_path / "none", host="jax")
    for package in ("transformer_lens", "nnsight"):
        for name in [name for name in sys.modules if name.startswith((f"{package}.", f"mi_route2.hosts.{package}"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)  # to Python, a package that is not installed
        with pytest.raises(ValueError, match=f"the host '{package}' needs the package '{package}', which is not installed"):
            load(tmp_path / "none", host=package)


def test_adapters_are_checked_too(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none has no route2_adapters\.safetensors"):
        load(tmp_path / "no base either", adapters=tmp_path / "none")
    adapters = attach(make_family("Llama"), "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    save_pretrained(adapters, tmp_path / "llama")
    with pytest.raises(ValueError, match="trained on other base weights"):
        load(qwen, adapters=tmp_path / "llama")
    export_peft(adapters, tmp_path / "peft")
    for folder, of in ((tmp_path / "llama", "route2_config.json"), (tmp_path / "peft", "adapter_config.json")):
        with pytest.raises(FileNotFoundError, match=f"has no config.json.*its {of} belongs to adapters"):
            load(folder)


def test_another_base_is_taken_when_that_is_meant(qwen: Path, tmp_path: Path) -> None:
    adapters = attach(make_family("Qwen3"), "blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    save_pretrained(move(adapters), tmp_path / "a")
    with pytest.raises(ValueError, match="any_base=True"):
        load(qwen, dtype=torch.float32, adapters=tmp_path / "a")
    narrow = load(qwen, dtype=torch.float32, adapters=tmp_path / "a", any_base=True)
    with torch.no_grad(), adapters.deployed():
        want = adapters.model(TOKENS).logits
        assert torch.allclose(narrow.logits(TOKENS).double(), want, rtol=0, atol=1e-4)
    assert from_pretrained(load(qwen), tmp_path / "a").spec.quarantine == "none"


@pytest.mark.process
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """The libraries take seconds each."""
    libraries = "{'transformers', 'transformer_lens', 'nnsight', 'peft', 'mi_route2.engine', 'torch._dynamo'}"
    code = f"import sys, torch, mi_route2, mi_route2.routing; print({libraries} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
