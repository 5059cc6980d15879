"""The console script ``mi-route2``: check a model, serve it, sweep patches, export adapters, run the study.

mi-route2 check CHECKPOINT                         where its sites are, or the check that it fails
mi-route2 serve --model smollm2
mi-route2 sweep smollm2 --clean "When Mary and John went out, John thanked" --corrupt "When Mary and John went out, Mary thanked"
                        --answer " Mary" --foil " John" --out sweep.png
mi-route2 export CHECKPOINT ADAPTERS OUT --form merged
mi-route2 study run --preset strong                in a clone of the repository
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mi_route2.serve.command import serve


def sweep(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="folder of a checkpoint with its tokenizer, an id, or smollm2")],
    clean: Annotated[str, tyro.conf.arg(help="prompt whose activations are patched in")],
    corrupt: Annotated[str, tyro.conf.arg(help="prompt that is run")],
    answer: Annotated[str, tyro.conf.arg(help="token that the clean prompt should give, as ' Mary'")],
    foil: Annotated[str, tyro.conf.arg(help="token that the corrupt prompt should give")],
    sites: Annotated[str, tyro.conf.arg(help="a point of every block, or a glob of sites")] = "resid_pre",
    out: Annotated[Path, tyro.conf.arg(help="picture: png, svg or pdf")] = Path("sweep.png"),
) -> None:
    """Patch every site at every position of one prompt into another, and draw how much of the answer each restores."""
    from transformers import AutoTokenizer

    from mi_route2.hosts.load import load
    from mi_route2.models import smollm2, smollm2_tokenizer
    from mi_route2.patching.sweep import sweep as run_sweep

    host, tokenizer = (
        (smollm2(), smollm2_tokenizer()) if model == "smollm2" else (load(model), AutoTokenizer.from_pretrained(model))
    )
    grid = run_sweep(host, clean=clean, corrupt=corrupt, sites=sites, answer=answer, foil=foil, tokenizer=tokenizer)
    grid.heatmap(out)
    print(f"logit difference {grid.clean:+.2f} clean, {grid.corrupt:+.2f} corrupt; wrote {out}")


def check(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="folder of a checkpoint, or an id")],
    host: Annotated[Literal["torch", "transformer_lens", "nnsight"], tyro.conf.arg(help="library that runs the model")] = "torch",
) -> None:
    """Print where the sites of a model are, and check on random tokens that they are what they are called."""
    from mi_route2.hosts.check import check_report
    from mi_route2.hosts.load import load

    opened = load(model, host=host)
    inside = getattr(opened.model, "original_model", opened.model)
    print(check_report(opened, inside))


def export(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="folder of the base checkpoint, or an id")],
    adapters: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder that save_pretrained wrote")],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder to write")],
    form: Annotated[Literal["peft", "merged"], tyro.conf.arg(help="a LoRA for PEFT, or a checkpoint for transformers")] = "peft",
) -> None:
    """Write the deployed model, the kept adapter without the quarantine, for other libraries."""
    from mi_route2.adapters import export_merged, export_peft, from_pretrained
    from mi_route2.hosts.load import load

    attached = from_pretrained(load(model), adapters)
    (export_peft if form == "peft" else export_merged)(attached, out)
    print(f"wrote {out}")


def study() -> None:
    """Train arms, report and compare them (``mi-route2 study --help``); needs a clone of the repository."""


def main() -> None:
    """Run a command; an error is one line."""
    if sys.argv[1:2] == ["study"]:
        sys.path.insert(0, "")  # a clone is run from its folder
        if find_spec("studies") is None:
            sys.exit("mi-route2 study: the studies are not in the package: clone the repository and run this in its folder")
        del sys.argv[1]
        runpy.run_module("studies.route2", run_name="__main__")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"check": check, "serve": serve, "sweep": sweep, "export": export, "study": study},
            prog="mi-route2",
            description=(__doc__ or "").splitlines()[0],
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"mi-route2: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
