"""A checkpoint as a host: ``load("path or id", host="torch")``.

Whatever can be checked is checked before the weights are read: the host, the folder, the architecture, the adapters. Only
safetensors are read, no pickle, and no code of the checkpoint's is run. An id goes through transformers and its cache, and under
``HF_HUB_OFFLINE=1`` nothing is asked of the network.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from mi_route2.adapters.io import from_pretrained, read_config
from mi_route2.architectures import ARCHITECTURES
from mi_route2.checks import checked
from mi_route2.hosts import host_class
from mi_route2.hosts.base import Host

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE = (
    "pickled weights can run code when they are read, and are refused: write them as safetensors with save_pretrained of "
    "transformers, on a machine where that is no harm"
)


@checked
def load(
    path_or_id: str | Path,
    *,
    host: str = "torch",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn: str | None = None,
    revision: str | None = None,
    adapters: str | Path | None = None,
    any_base: bool = False,
    cache_dir: Path | None = None,
) -> Host:
    """The causal language model in a local folder, or of a Hugging Face id, on a host, in ``eval`` mode.

    ``host`` is ``torch``, ``transformer_lens`` or ``nnsight``. ``dtype`` (the checkpoint's own), ``device`` (the CPU), ``attn``
    (its ``attn_implementation``) and ``revision`` are what they are in transformers. ``adapters`` is a folder that
    ``save_pretrained`` wrote, attached with ``any_base`` and ``cache_dir`` as by ``from_pretrained``: call that on the host instead
    where you need the ``Adapters``.

    ``FileNotFoundError`` for what is not there, or cannot be had offline; ``ValueError`` for an unknown host, an architecture
    without a row, pickled weights, a checkpoint that is damaged or lacks weights, and adapters that do not fit.
    """
    opened = host_class(host)  # imported only now: the libraries take seconds, and one may be missing
    if adapters is not None:
        read_config(Path(adapters))
    source = _source(path_or_id)
    model = _model(source, _config(source, revision), dtype, attn, revision)
    if device is not None:
        model.to(device)  # pyright: ignore[reportArgumentType]
    found = opened(model)
    if adapters is not None:
        from_pretrained(found, adapters, any_base=any_base, cache_dir=cache_dir)
    return found


def _source(path_or_id: str | Path) -> Path | str:
    """A folder that holds a checkpoint, or what can only be an id."""
    path, text = Path(path_or_id).expanduser(), str(path_or_id)
    if path.is_dir():
        _refuse_other_folder(path)
        return path
    if path.exists():
        raise ValueError(f"{text} is a file: give the folder of the checkpoint, with its config.json")
    if isinstance(path_or_id, Path) or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {text}; a Hugging Face id would be a string like owner/name")
    return text


def _refuse_other_folder(path: Path) -> None:
    names = sorted(file.name for file in path.iterdir())
    if "config.json" not in names:
        of_adapters = next((name for name in ("route2_config.json", "adapter_config.json") if name in names), None)
        hint = f"; its {of_adapters} is one of adapters, which stand on a base model" if of_adapters else ""
        raise FileNotFoundError(f"{path} has no config.json, so it is no checkpoint of transformers{hint}")
    if not any(name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        if pickled := [name for name in names if name.endswith(_PICKLED)]:
            raise ValueError(f"{path} has its weights in {pickled[0]} alone; {_PICKLE}")
        raise FileNotFoundError(f"{path} has no weights: there is no model.safetensors in it, nor shards of one")


def _config(source: Path | str, revision: str | None) -> Any:
    """The checkpoint's config, once it is known that its architecture has a row."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of_transformers = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    known = [name for row in ARCHITECTURES.values() for name in row.classes if name in of_transformers]
    choose = f"choose among {', '.join(dict.fromkeys(known))}, or add a row to architectures.py"
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except OSError as error:
        raise _unreachable(source, error) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{source} brings code of its own for its architecture, which is not run: {choose}") from error
        raise ValueError(f"transformers does not know the architecture of {source}: {choose}") from error
    except Exception as error:  # its validators have errors of their own
        raise ValueError(f"the config of {source} is not valid: {' '.join(str(error).split())}") from error
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    name = getattr(kind, "__name__", type(config).__name__)
    if name not in known:
        raise ValueError(f"{source} is a {name}, which has no row: {choose}")
    return config


def _model(source: Path | str, config: Any, dtype: torch.dtype | str | None, attn: str | None, revision: str | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    given = {"dtype": dtype, "attn_implementation": attn, "revision": revision}
    keywords: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with a sentence
            **keywords,
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {source} are no whole safetensors ({error}); copy or download them again") from error
    except OSError as error:
        raise _unreachable(source, error) from error
    model, report = found
    # transformers draws at random what a checkpoint lacks, says so in its log, and goes on.
    missing, misshapen = report["missing_keys"], [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} weights that its config asks for, first {min(missing)!r}")
    if misshapen:
        raise ValueError(f"{source} has {len(misshapen)} weights of other shapes than its config says, first {min(misshapen)!r}")
    return model


def _unreachable(source: Path | str, error: OSError) -> Exception:
    """What to say where transformers could not get a file."""
    from transformers.utils.hub import is_offline_mode

    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(source, Path):
        return ValueError(f"{source} cannot be read ({reason}); copy it again, whole")
    if is_offline_mode():
        return FileNotFoundError(
            f"{source!r} is no folder here, and its config or safetensors are not in the Hugging Face cache while HF_HUB_OFFLINE "
            f"forbids to download them: give the path of a checkpoint's folder, or run `hf download {source}` without it, once"
        )
    if "safetensors" in reason:
        return ValueError(f"{source!r} has no safetensors; {_PICKLE}")
    return FileNotFoundError(
        f"{source!r} is no folder here, and Hugging Face did not give it ({reason}): give the path of a checkpoint's folder, or "
        "check the name, the network and your access"
    )
