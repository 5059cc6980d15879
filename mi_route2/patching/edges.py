"""Edges between components: what each adds to the residual stream, as each later one reads it, and circuits of the strongest edges.

A sender is the embedding (the stream before block 0), a head's part of ``attn_out``, or ``mlp_out``. A receiver is a head's query,
key or value (a key-value head is one), the input of an MLP, or the logits. With ``G_r`` the gradient of the score with respect to
the stream that receiver r reads, through r alone:

    score[s, r] = sum over positions (clean_s - corrupt_s) . G_r       eap: in the corrupt run        Syed et al., arXiv:2310.10348
                                                                       ig: mean over runs between the embeddings of both prompts,
                                                                                                      Hanna et al., arXiv:2403.17806

A circuit runs with ``stream_r = corrupt_r + sum over kept edges (s, r) of (current_s - corrupt_s)``. All of this needs a stream
that is the sum of the embedding and all outputs, which is checked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mi_route2.checks import checked
from mi_route2.hosts.base import LEAK, Edit, Host, expose, gradients, reader
from mi_route2.patching.attribution import chunks, midpoints, put_at, scored
from mi_route2.patching.forwards import Whole
from mi_route2.patching.grid import t_interval
from mi_route2.patching.question import Answers, CleanRun, Given, Metric, Prompts, Question, ask, each_pair
from mi_route2.patching.sweep import Pair, record
from mi_route2.patching.targets import Target
from mi_route2.sites import Site
from mi_route2.steering.specs import patch, wide


@dataclass(frozen=True)
class Edge:
    """Edge with its mean score over pairs of prompts, and the 95% t interval of two or more (``None`` for one)."""

    sender: str
    receiver: str
    score: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """Scores of all edges.

    Attributes:
        senders: Names, in order of the forward: ``embed``, ``blocks.0.z[2]``, ``blocks.0.mlp_out``.
        receivers: Names: ``blocks.0.q[2]``, ``blocks.0.mlp_in``, ``logits``.
        pairs: Scores of every pair of prompts, NaN where a sender comes after a receiver.
        clean: Mean score of the clean runs.
        corrupt: Mean score of the corrupt runs.
        method: ``eap`` or ``ig``.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    pairs: Float[np.ndarray, "n senders receivers"]
    clean: float
    corrupt: float
    method: str
    _circuits: tuple["_Circuit", ...] = field(default=())

    @cached_property
    def scores(self) -> Float[np.ndarray, "senders receivers"]:
        """Mean over pairs of prompts."""
        return self.pairs.mean(0)

    @cached_property
    def _order(self) -> np.ndarray:
        size = np.where(np.isnan(self.scores), -1.0, np.abs(self.scores)).ravel()
        return np.argsort(-size, kind="stable")[: int((size >= 0).sum())]

    def __len__(self) -> int:
        return len(self._order)

    @checked
    def top(self, k: int) -> list[Edge]:
        """Return the ``k`` edges with the largest absolute scores, largest first; ``ValueError`` for a negative ``k``."""
        bounds = t_interval(self.pairs) if len(self.pairs) > 1 else None
        edges: list[Edge] = []
        for flat in self._strongest(k):
            s, r = divmod(int(flat), len(self.receivers))
            interval = None if bounds is None else (float(bounds[0, s, r]), float(bounds[1, s, r]))
            edges.append(Edge(self.senders[s], self.receivers[r], float(self.scores[s, r]), interval))
        return edges

    def _strongest(self, k: int) -> np.ndarray:
        if k < 0:
            raise ValueError(f"the {k} strongest edges do not exist: choose 0 or more")
        return self._order[:k]

    @checked
    def faithfulness(self, kept: int | Sequence[int] | Bool[np.ndarray, "*n senders receivers"]) -> Float[np.ndarray, " n"]:
        """Return the share of ``clean - corrupt`` that circuits keep, from runs with all other edges patched to the corrupt run.

        Args:
            kept: Numbers of strongest edges, or masks of the edges to keep.

        Raises:
            ValueError: Clean and corrupt have the same score, or a negative number of edges.

        Examples:
            >>> graph.faithfulness([0, len(graph)]).round(6)
            array([0., 1.])
        """
        if self.clean == self.corrupt:
            raise ValueError(f"clean and corrupt both score {self.clean:.6g}, so there is no effect to keep: choose other prompts")
        if isinstance(kept, np.ndarray):
            masks = kept.reshape(-1, *self.scores.shape)
        else:
            counts = [kept] if isinstance(kept, int | np.integer) else kept
            masks = np.zeros((len(counts), self.scores.size), dtype=bool)
            for mask, k in zip(masks, counts):
                mask[self._strongest(k)] = True
            masks = masks.reshape(-1, *self.scores.shape)
        scores = np.mean([circuit.run(torch.from_numpy(masks)) for circuit in self._circuits], 0)
        return (scores - self.corrupt) / (self.clean - self.corrupt)

    def __repr__(self) -> str:
        best = ", ".join(f"{edge.sender} -> {edge.receiver} {edge.score:+.3g}" for edge in self.top(3))
        return f"Graph({len(self)} edges, {self.method}, {len(self.pairs)} pairs: {best})"

    @checked
    def to_json(self, k: int | None = None) -> dict[str, Any]:
        """Return the ``k`` strongest edges (all by default) as node-link data, which ``networkx.node_link_graph`` reads."""
        edges = self.top(len(self) if k is None else k)
        names = dict.fromkeys(name for edge in edges for name in (edge.sender, edge.receiver))
        links = [
            {
                "source": edge.sender,
                "target": edge.receiver,
                "weight": edge.score,
                "interval": edge.interval and list(edge.interval),
            }
            for edge in edges
        ]
        about = {"method": self.method, "clean": self.clean, "corrupt": self.corrupt, "pairs": len(self.pairs)}
        return {"directed": True, "multigraph": False, "graph": about, "nodes": [{"id": name} for name in names], "edges": links}

    @checked
    def draw(self, path: Path | str, k: int = 30) -> Path:
        """Draw the ``k`` strongest edges as png, svg or pdf, from the embedding upwards, and return the path."""
        return draw(self, Path(path), k)


@checked
@torch.inference_mode(False)
def edges(
    host: Host,
    *,
    clean: Given | CleanRun | Prompts,
    corrupt: Given | Prompts,
    answer: Answers = None,
    foil: Answers = None,
    metric: Metric = "logit_diff",
    at: int | None = None,
    tokenizer: Any = None,
    method: Literal["eap", "ig"] = "eap",
    steps: int | None = None,
) -> Graph:
    """Score every edge between components; prompts and metric as in ``sweep``, also several pairs.

    Two forwards of each prompt run, one that reads the heads' weights, and one with its backward, or ``steps`` of these.
    Positions of the corrupt prompt without a partner in the clean one keep their corrupt values.

    Args:
        method: ``eap``, or ``ig`` with gradients from ``steps`` embeddings between those of both prompts; 10 if ``None``.

    Raises:
        ValueError: As in ``sweep``; the metric has no gradient; ``steps`` with ``eap``; or the heads' outputs do not add up to the
            residual stream of this architecture (as where a norm follows them), or the host lacks a point.
        KeyError: As in ``sweep``.

    Examples:
        >>> graph = edges(host, clean=[3, 7, 1, 5], corrupt=[9, 7, 1, 5], answer=3, foil=9)
        >>> graph.top(1)[0].receiver
        'logits'
    """
    points = midpoints(steps, method == "ig")
    asked: dict[str, Any] = {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}
    circuits: list[_Circuit] = []
    scores: list[np.ndarray] = []
    for one in each_pair(asked) or [asked]:
        texts = one["clean"], one["corrupt"], None, metric, one["answer"], one["foil"], at
        question = ask(host, *texts, alpha=1.0, tokenizer=tokenizer, together=False)
        circuits.append(circuit := _circuit(Whole(host), question, circuits[0].writes if circuits else None))
        scores.append(circuit.scores(points).cpu().numpy())
    clean_score, corrupt_score = (float(np.mean([circuit.pair.scores[i] for circuit in circuits])) for i in range(2))
    layout = circuits[0].layout
    return Graph(layout.senders, layout.receivers, np.stack(scores), clean_score, corrupt_score, method, tuple(circuits))


@dataclass(frozen=True)
class _Layout:
    """Order of senders and receivers, for blocks of ``heads`` and ``groups`` key-value heads; which are ``parallel``."""

    heads: int
    groups: int
    parallel: tuple[bool, ...]

    @property
    def width(self) -> int:
        """Number of receivers in a block: its queries, keys, values and MLP."""
        return self.heads + 2 * self.groups + 1

    @property
    def senders(self) -> tuple[str, ...]:
        blocks = ([*_named(layer, "z", self.heads), f"{Site(layer, 'mlp_out')}"] for layer in range(len(self.parallel)))
        return ("embed", *(name for block in blocks for name in block))

    @property
    def receivers(self) -> tuple[str, ...]:
        points = {"q": self.heads, "k": self.groups, "v": self.groups}
        names: list[str] = []
        for layer in range(len(self.parallel)):
            names += [name for point, count in points.items() for name in _named(layer, point, count)]
            names.append(f"{Site(layer, 'mlp_in')}")
        return (*names, "logits")

    @property
    def exists(self) -> Bool[Tensor, "senders receivers"]:
        """True where a sender comes before a receiver."""
        written, read = [0], list[int]()
        for layer, parallel in enumerate(self.parallel):
            written += [2 * layer + 1] * self.heads + [2 * layer + 2]
            read += [2 * layer + 1] * (self.width - 1) + [2 * layer + (1 if parallel else 2)]
        return torch.tensor(written)[:, None] < torch.tensor([*read, 2 * len(self.parallel) + 1])

    def stream(self, received: Site) -> Site:
        """Return the point of the stream that a receiver reads."""
        assert received.layer is not None
        middle = received.point == "mlp_in" and not self.parallel[received.layer]
        return Site(received.layer, "resid_mid" if middle else "resid_pre")

    def heads_of(self, layer: int) -> slice:
        """Return the senders that are heads of a layer; its MLP follows them."""
        first = 1 + layer * (self.heads + 1)
        return slice(first, first + self.heads)


def _named(layer: int, point: str, count: int) -> list[str]:
    return [str(Target(Site(layer, point), head)) for head in range(count)]


@dataclass(frozen=True, eq=False)
class _Circuit:
    """Runs of one pair of prompts.

    Attributes:
        corrupt: Values ``[s ...]`` of the corrupt run at every position.
        writes: What a unit of a head's ``z`` adds to the stream, by layer, ``[h dh d]``.
        change: Clean minus corrupt value of every sender, 0 at positions without a partner.
    """

    running: Whole
    pair: Pair
    layout: _Layout
    corrupt: Mapping[Site, Tensor]
    writes: Sequence[Float[Tensor, "h dh d"]]
    change: Float[Tensor, "senders s d"]

    @property
    def final(self) -> Site:
        return Site(len(self.writes) - 1, "resid_post")

    def scores(self, points: Sequence[float]) -> Float[Tensor, "senders receivers"]:
        """Return the score of every edge from gradients at these shares of the way between the embeddings."""
        layout, first, limits = self.layout, Site(0, "resid_pre"), self.running.limits()
        received = [Site(layer, point) for layer in range(len(self.writes)) for point in ("q", "k", "v", "mlp_in")]
        streams = {site: layout.stream(site) for site in received}
        sites = [*streams, *streams.values(), *(Site(layer, "attn_out") for layer in range(len(self.writes))), self.final]
        here, source = self.pair.values(Target(first))
        total = torch.zeros(layout.exists.shape, dtype=torch.float64)
        for some in chunks(points, limits.rows(limits.length)):
            exposed = dict[Site, Tensor]()
            write = partial(put_at, list(self.pair.question.sources), torch.stack([patch(here, source, point) for point in some]))
            edits = {site: expose(exposed, site, *([write] if site == first else [])) for site in sites}
            with scored(self.running.host, self.pair, edits, len(some)) as score:
                self._demand_parallel(exposed)
                slopes = gradients(score, [exposed[site] for site in (*received, self.final)], keep=True)
                pulled = [_pulled(exposed[site], exposed[streams[site]], slope) for site, slope in zip(received, slopes)]
            pulled.append(slopes[-1].sum(0)[None])
            total += torch.einsum("usd,rsd->ur", self.change, torch.cat(pulled).to(self.change)).to(total)
        return (total / len(points)).masked_fill(~layout.exists, torch.nan)

    def _demand_parallel(self, exposed: Mapping[Site, Tensor]) -> None:
        """Raise ``ValueError`` if an MLP without ``resid_mid`` reads its layer's attention after all."""
        for layer in (layer for layer, parallel in enumerate(self.layout.parallel) if parallel):
            ends = exposed[Site(layer, "mlp_in")].sum(), exposed[Site(layer, "attn_out")]
            if torch.autograd.grad(*ends, retain_graph=True, allow_unused=True) != (None,):
                raise ValueError(
                    f"the host {self.running.host.name} has no resid_mid in layer {layer}, which its MLP reads: use torch"
                )

    def run(self, masks: Bool[Tensor, "n senders receivers"]) -> list[float]:
        """Return the scores of runs in which receivers read the current values of these edges alone."""
        limits, question = self.running.limits(), self.pair.question
        most = max(1, limits.rows(limits.length) // self.layout.width)
        logits = torch.cat([self._logits(kept.to(self.change)) for kept in masks.split(most)])
        return question.grader(logits, self.pair.clean.logits).tolist()

    def _logits(self, kept: Float[Tensor, "n senders receivers"]) -> Float[Tensor, "n v"]:
        """Return the logits of each circuit, which has a row for every receiver of a block: each reads another stream."""
        layout, n, width = self.layout, len(kept), self.layout.width
        now = self.change.new_zeros(n, *self.change.shape)  # current minus corrupt value of the senders that have run
        now[:, 0] = self.change[0]

        def reading(site: Site, columns: slice, value: Tensor) -> Tensor:
            stream = self.corrupt[site] + torch.einsum("nur,nusd->nrsd", kept[:, :, columns], now)
            return stream.expand(-1, width, -1, -1).flatten(0, 1).to(value)

        def own_rows(first: int, value: Tensor) -> Tensor:
            """Give every row the heads that have read their own streams."""
            head = torch.arange(value.shape[2], device=value.device)
            own = value.unflatten(0, (n, width))[:, first + head, :, head].movedim(0, 2)
            return own[:, None].expand(-1, width, -1, -1, -1).flatten(0, 1)

        def heads(layer: int, value: Tensor) -> None:
            change = value.unflatten(0, (n, width))[:, 0] - self.corrupt[Site(layer, "z")]
            now[:, layout.heads_of(layer)] = torch.einsum("nshe,hed->nhsd", change.to(now), self.writes[layer])

        def mlp(layer: int, value: Tensor) -> None:
            now[:, layout.heads_of(layer).stop] = value.unflatten(0, (n, width))[:, -1] - self.corrupt[Site(layer, "mlp_out")]

        edits: dict[Site, Edit] = {}
        for layer in range(len(self.writes)):
            columns = slice(layer * width, (layer + 1) * width)
            edits[Site(layer, "resid_pre")] = partial(reading, Site(layer, "resid_pre"), columns)
            for point, first in (("q", 0), ("k", layout.heads), ("v", layout.heads + layout.groups)):
                edits[Site(layer, point)] = partial(own_rows, first)
            edits[Site(layer, "z")], edits[Site(layer, "mlp_out")] = partial(heads, layer), partial(mlp, layer)
            if not layout.parallel[layer]:
                edits[Site(layer, "resid_mid")] = partial(reading, Site(layer, "resid_mid"), slice(columns.stop - 1, columns.stop))
        edits[self.final] = partial(reading, self.final, slice(-1, None))
        return self.running.under(edits, n * width)[::width]


_POINTS = ("q", "k", "v", "z", "attn_out", "mlp_in", "mlp_out")


def _circuit(running: Whole, question: Question, writes: Sequence[Tensor] | None) -> _Circuit:
    """Run both prompts; read what heads write, unless it is known."""
    host, layers = running.host, running.host.layers()
    known = set(host.sites())
    for site in (Site(layer, point) for layer in layers for point in _POINTS):
        if site not in known:
            raise ValueError(
                f"edges need {', '.join(_POINTS)} of every layer, and this host has no {site}: take attribute or paths"
            )
    blocks = [Site(layer, point) for layer in layers for point in ("z", "mlp_out")]
    pair = record(running, question, [Site(0, "resid_pre"), *blocks])
    sites = [
        site
        for layer in layers
        for point in ("resid_pre", "q", "k", "attn_out", "resid_mid")
        if (site := Site(layer, point)) in known
    ]
    tokens, last = question.corrupt.tokens[: question.at + 1], Site(layers[-1], "resid_post")
    corrupt = running.record(tokens, [*sites, *blocks, last], range(len(tokens))).values
    shapes = {(corrupt[Site(layer, "q")].shape[1], corrupt[Site(layer, "k")].shape[1]) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(f"layers of this model have different numbers of heads, {sorted(shapes)}: take attribute or paths")
    layout = _Layout(*shapes.pop(), tuple(Site(layer, "resid_mid") not in known for layer in layers))
    if writes is None:
        outputs = [corrupt[Site(layer, point)] for layer in layers for point in ("attn_out", "mlp_out")]
        _demand_sum(corrupt[last], corrupt[Site(0, "resid_pre")] + sum(outputs), "the residual stream", "the outputs of blocks")
        writes = _writes(running, corrupt, layers)
    change = torch.zeros(len(layout.senders), len(tokens), corrupt[last].shape[-1], dtype=wide(corrupt[last].dtype)).to(
        corrupt[last].device
    )
    index, changes = (
        list(question.sources),
        {site: (pair.clean.values[site].to(change) - value.to(change)) for site, value in pair.corrupt.values.items()},
    )
    change[0, index] = changes[Site(0, "resid_pre")]
    for layer in layers:
        heads = layout.heads_of(layer)
        change[heads, index] = torch.einsum("phe,hed->hpd", changes[Site(layer, "z")], writes[layer])
        change[heads.stop, index] = changes[Site(layer, "mlp_out")]
    return _Circuit(running, pair, layout, corrupt, writes, change)


def _writes(running: Whole, corrupt: Mapping[Site, Tensor], layers: Iterable[int]) -> list[Float[Tensor, "h dh d"]]:
    """Return what a unit of each head's ``z`` adds to the stream, from one forward over all units of all layers at once."""
    length, heads, size = corrupt[Site(0, "z")].shape
    rows = heads * size // length + 1  # at least one unit more, of zeros
    units = torch.eye(rows * length, heads * size).view(rows, length, heads, size)
    outputs, edits = dict[Site, Tensor](), dict[Site, Edit]()
    for layer in layers:
        edits[Site(layer, "z")] = units.to
        edits[Site(layer, "attn_out")] = reader(outputs, Site(layer, "attn_out"))
    running.under(edits, rows)
    writes: list[Tensor] = []
    for site, output in outputs.items():
        output = output.flatten(0, 1).to(wide(output.dtype))
        writes.append((output[: heads * size] - output[-1]).unflatten(0, (heads, size)))
        parts = torch.einsum("she,hed->sd", corrupt[Site(site.layer, "z")].to(output), writes[-1]) + output[-1]
        _demand_sum(corrupt[site], parts, f"{site}", "its heads, because a norm follows them or it reads more")
    return writes


def _demand_sum(whole: Tensor, parts: Tensor, name: str, of: str) -> None:
    miss, most = (float(value.abs().max()) for value in (whole.to(parts) - parts, whole))
    if not miss <= (LEAK if whole.dtype in (torch.float32, torch.float64) else 0.05) * most:
        raise ValueError(f"{name} of this architecture is not the sum of {of}, so it has no edges: take attribute or paths")


def _pulled(value: Tensor, stream: Tensor, slope: Tensor) -> Float[Tensor, "r s d"]:
    """Return the gradient at the stream through each head of ``value`` alone, or through all of it, summed over rows."""
    parts = slope[None]
    if slope.ndim == 4:
        parts = slope * torch.eye(slope.shape[2]).to(slope)[:, None, None, :, None]
    return torch.autograd.grad(value, stream, parts, retain_graph=True, is_grads_batched=True)[0].sum(1)


_LINES = {"q": "solid", "k": "dashed", "v": "dotted"}


def draw(graph: Graph, path: Path, k: int) -> Path:
    """Draw the strongest edges; see ``Graph.draw``."""
    from mi_route2.plots import BLUE, GRAY, PAGE_WIDTH, VERMILLION, new_figure, save_figure, style

    chosen = graph.top(k)
    targets = {name: Target.parse(name) for name in (*graph.senders[1:], *graph.receivers[:-1])}
    counts = {target.site.point: 1 + (target.head or 0) for target in targets.values()}
    rows = {"embed": (-1, 0), "logits": (len(targets), 0)} | {
        name: (target.site.layer or 0, int(target.head is None)) for name, target in targets.items()
    }
    names = dict.fromkeys(name for edge in chosen for name in (edge.sender, edge.receiver))
    used = sorted({rows[name] for name in names})  # layers without an edge take no room

    def place(name: str) -> tuple[float, int]:
        x = 0.5
        if name in targets:  # heads side by side, and MLPs to their right
            head, point = targets[name].head, targets[name].site.point
            x = 0.93 if head is None else 0.86 * (head + 0.5) / counts[point]
        return x, used.index(rows[name])

    with style():
        figure = new_figure(PAGE_WIDTH, min(40.0, 1.2 + 0.4 * len(used)))
        axes = figure.add_subplot()
        axes.grid(visible=False)
        most = max((abs(edge.score) for edge in chosen), default=1.0) or 1.0
        for edge in chosen:
            (x0, y0), (x1, y1) = place(edge.sender), place(edge.receiver)
            point = "" if edge.receiver == "logits" else targets[edge.receiver].site.point
            line: dict[str, Any] = {"color": BLUE if edge.score > 0 else VERMILLION, "linestyle": _LINES.get(point, "solid")}
            axes.plot((x0, x1), (y0, y1), linewidth=0.3 + 3 * abs(edge.score) / most, alpha=0.7, **line)
        for name in names:
            text = name if name not in targets else "MLP" if (head := targets[name].head) is None else f"{head}"
            if name in targets and targets[name].site.point in "kv" and counts["k"] < counts["q"]:
                text = f"kv {text}"
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": GRAY}
            axes.text(*place(name), text, ha="center", va="center", bbox=box)
        axes.set(xlim=(0, 1), ylim=(-0.7, len(used) - 0.3), xticks=[], title=f"{len(chosen)} strongest of {len(graph)} edges")
        axes.set_yticks(range(len(used)), [f"layer {layer}" if 0 <= layer < len(targets) else "" for layer, _ in used])
        for point, shape in _LINES.items():
            axes.plot([], [], color=GRAY, linestyle=shape, label=f"into {point}{', MLPs, logits' * (point == 'q')}")
        axes.plot([], [], color=BLUE, label="toward clean")
        axes.plot([], [], color=VERMILLION, label="away from clean")
        figure.legend(loc="outside lower center", ncols=5)
        return save_figure(figure, path)
