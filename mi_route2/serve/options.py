"""Options and limits of the server. Nothing here needs torch or a web framework, so ``--help`` waits for neither."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mi_route2.validation import AtLeastOne, Natural, Positive, validated

KEY = "MI_ROUTE2_KEY"
Mode = Literal["full", "deployed", "reference"]


@validated
class Limits:
    """Limits of the server.

    Attributes:
        rows: Requests that run at once.
        queue: Requests that may wait.
        patience: Steps after which the first waiting request of a low priority gains a level.
        per_key: Requests of one key in the server at once; never more than an equal share of those that may run and wait.
        sweeps: Sweeps of one key at once.
        cells: Cells of one sweep.
        deadline: Seconds after which a request or a sweep ends, between two of its forwards.
        max_body: Bytes of a body.
        backlog: Steps that a stream may wait for its reader.
        store: Bytes of captured runs, and of those that one key writes at once.
        prefix_bytes: Bytes of the prefix cache; 0 switches it off.
        capture_bytes: Bytes of captured values in one answer, and of its log-probabilities, readings and norms; a run that is
            captured counts to the store instead, until its values are read.
        sweep_bytes: Bytes of keys, values and activations that one sweep may hold.
        slot_bytes: Bytes of keys and values that running requests may reserve; if none are given, an eighth of the free memory on a
            CPU, from 256 MiB to 8 GiB, and any number elsewhere.
    """

    rows: AtLeastOne = 64
    queue: AtLeastOne = 1024
    patience: AtLeastOne = 64
    per_key: AtLeastOne = 512
    sweeps: AtLeastOne = 4
    cells: AtLeastOne = 200_000
    deadline: Positive = 600.0
    max_body: AtLeastOne = 16 << 20
    backlog: AtLeastOne = 1024
    store: AtLeastOne = 256 << 20
    prefix_bytes: Natural = 256 << 20
    capture_bytes: AtLeastOne = 64 << 20
    sweep_bytes: AtLeastOne = 512 << 20
    slot_bytes: AtLeastOne | None = None


@dataclass(frozen=True)
class Options:
    """Options of the server."""

    model: Annotated[str, tyro.conf.arg(help="micro, smollm2, the folder of a checkpoint, or module:function")] = "micro"
    adapters: Annotated[Path | None, tyro.conf.arg(help="folder of adapters, as save_pretrained writes it")] = None
    mode: Annotated[Mode, tyro.conf.arg(help="which adapters act")] = "full"
    dtype: Annotated[str | None, tyro.conf.arg(help="type of a checkpoint's weights, as float32 or bfloat16")] = None
    device: Annotated[str | None, tyro.conf.arg(help="device of the model, as cpu or cuda")] = None
    host: Annotated[str, tyro.conf.arg(help="address to listen at; any other than this machine's own needs keys")] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(help="port; 0 takes a free one")] = 8000
    keys: Annotated[
        Path | None, tyro.conf.arg(help=f"file of keys, one per line, an admin's after the word admin; or one in ${KEY}")
    ] = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)
    exact: Annotated[bool, tyro.conf.arg(help="answers do not depend on other requests, bit for bit (slower)")] = False
    study_runs: Annotated[Path | None, tyro.conf.arg(help="folder of studies' runs, for the page")] = None
    drain: Annotated[float, tyro.conf.arg(help="seconds that running requests have to end after SIGTERM")] = 10.0
    threads: Annotated[int | None, tyro.conf.arg(help="threads of torch")] = None
    log_prompts: Annotated[bool, tyro.conf.arg(help="write what clients ask into the log too")] = False
