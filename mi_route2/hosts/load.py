"""Load a checkpoint as a host: ``load("path or id", host="torch")``.

The host, the folder, the architecture and the adapters are checked before the weights are read. Only safetensors are read, no
pickle, and no code from the checkpoint is run. An id is resolved by transformers and its cache; with ``HF_HUB_OFFLINE=1`` no
network is used.
"""

from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from mi_route2.adapters.io import from_pretrained, read_folder
from mi_route2.checks import checked
from mi_route2.hosts import host_class
from mi_route2.hosts.base import Host

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE = (
    "pickled weights can run code when they are read, and are refused: convert them to safetensors with save_pretrained of "
    "transformers, on a machine where such code can do no harm"
)

_DAMAGED = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, JSONDecodeError, UnicodeDecodeError)
"""Errors of transformers for a config or an index of shards that it can parse but not use, or cannot parse."""


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
    """Load a causal language model from a local folder or a Hugging Face id, on a host, in ``eval`` mode.

    Args:
        path_or_id: Folder of a checkpoint, or an id such as ``owner/name``.
        host: ``torch``, ``transformer_lens`` or ``nnsight``.
        dtype: As in transformers; the checkpoint's own if not given.
        device: The CPU if not given.
        attn: ``attn_implementation`` of transformers.
        revision: As in transformers.
        adapters: Folder that ``save_pretrained`` wrote, attached as by ``from_pretrained``. Call that function on the host instead
            if you need the ``Adapters``.
        any_base: As in ``from_pretrained``.
        cache_dir: As in ``from_pretrained``.

    Raises:
        FileNotFoundError: The folder or a file does not exist, or cannot be downloaded (offline).
        ValueError: An unknown host, an architecture without a row, pickled weights, a damaged checkpoint or one that lacks weights
            or has an adapter of PEFT beside it, or adapters that do not fit.

    Examples:
        >>> host = load(checkpoint, host="torch")
    """
    opened = host_class(host)  # a late import: the libraries take seconds to import, and one may be missing
    if adapters is not None:
        read_folder(Path(adapters))
    source = _source(path_or_id)
    model = _model(source, _config(source, revision), dtype, attn, revision)
    if device is not None:
        model.to(device)  # pyright: ignore[reportArgumentType]
    loaded = opened(model)
    if adapters is not None:
        from_pretrained(loaded, adapters, any_base=any_base, cache_dir=cache_dir)
    return loaded


def _source(path_or_id: str | Path) -> Path | str:
    """Return the folder of the checkpoint, or the id."""
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
        hint = f"; its {of_adapters} belongs to adapters, which need a base model" if of_adapters else ""
        raise FileNotFoundError(f"{path} has no config.json, so it is not a checkpoint of transformers{hint}")
    if not any(name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        if pickled := [name for name in names if name.endswith(_PICKLED)]:
            raise ValueError(f"{path} has its weights only in {pickled[0]}; {_PICKLE}")
        raise FileNotFoundError(f"{path} has no weights: it has neither a model.safetensors nor shards of one")


def _config(source: Path | str, revision: str | None) -> Any:
    """Return the checkpoint's config, after checking that its architecture has a row."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    choose = "choose a causal language model that transformers knows, such as Qwen2ForCausalLM"
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except OSError as error:
        raise _unreachable(source, error) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{source} needs its own code for its architecture, which is not run: {choose}") from error
        raise ValueError(f"transformers does not know the architecture of {source}: {choose}") from error
    except Exception as error:  # the validators of transformers raise other types of errors
        raise ValueError(f"the config of {source} is not valid: {' '.join(str(error).split())}") from error
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.is_encoder_decoder:
        raise ValueError(f"{source} is a {type(config).__name__.removesuffix('Config')}: {choose}")
    if find_adapter_config_file(str(source), revision=revision) is not None:
        raise ValueError(
            f"{source} has an adapter_config.json beside its checkpoint, and with peft transformers would run that adapter in the "
            "model: give a folder with the checkpoint alone"
        )
    return config


def _model(source: Path | str, config: Any, dtype: torch.dtype | str | None, attn: str | None, revision: str | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": attn, "revision": revision}
    keywords: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with a sentence
            **keywords,
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {source} are not complete safetensors ({error}); copy or download them again") from error
    except OSError as error:
        raise _unreachable(source, error) from error
    except _DAMAGED as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"a JSON file of {source} does not fit its weights, or is damaged ({why}); copy it again") from error
    model, report = loaded
    # transformers initializes missing weights at random and only logs a warning.
    missing, misshapen = report["missing_keys"], [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} weights that its config asks for, first {min(missing)!r}")
    if misshapen:
        raise ValueError(f"{source} has {len(misshapen)} weights of other shapes than its config says, first {min(misshapen)!r}")
    return model


def _unreachable(source: Path | str, error: OSError) -> Exception:
    """Return the error for a file that transformers could not read or download."""
    from transformers.utils.hub import is_offline_mode

    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(source, Path):
        return ValueError(f"{source} cannot be read ({reason}); copy it again")
    if is_offline_mode():
        return FileNotFoundError(
            f"{source!r} is not a folder, and its config or safetensors are not in the Hugging Face cache while HF_HUB_OFFLINE "
            f"forbids a download: give the path of a checkpoint's folder, or run `hf download {source}` once without it"
        )
    if "safetensors" in reason:
        return ValueError(f"{source!r} has no safetensors; {_PICKLE}")
    return FileNotFoundError(
        f"{source!r} is not a folder, and could not be downloaded from Hugging Face ({reason}): give the path of a checkpoint's "
        "folder, or check the name, the network and your access"
    )
