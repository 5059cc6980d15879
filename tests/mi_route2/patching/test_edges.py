"""Edges are derivatives of exact path patching, and circuits are exact patches; both against TransformerLens's own."""

from functools import cache
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from decoders import make_decoder
from families import VOCAB, make_family, move_all
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, Node, attribution_patch, faithfulness

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.patching import Graph, Target, attribute, edges, paths, sweep
from mi_route2.sites import Site

ANSWER, FOIL, LENGTH = 4, 9, 5
CLEAN, CORRUPT = (torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL}
KINDS = ("GPT2", "Qwen3", "GPTNeoX", "Mixtral", "Falcon", "Granite", "MicroGPT")
"""Biases, key-value heads, parallel blocks, experts, one tensor that both read, scaled outputs, and no transformers at all."""


@cache
def opened(kind: str, name: str = "torch") -> Host:
    family = kind in ("GPT2", "Qwen3", "GPTNeoX", "MicroGPT", "GPTNeoX (sequential)")
    return open_host(name, make_family(kind) if family else move_all(make_decoder(kind)))


def without(graph: Graph, node: str) -> np.ndarray:
    kept = np.ones(graph.scores.shape, dtype=bool)
    if node in graph.receivers:
        kept[:, graph.receivers.index(node)] = False
    else:
        kept[graph.senders.index(node)] = False
    return kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["eap", "ig"])
def test_circuits_are_exact_patches_and_a_senders_edges_add_up(kind: str, method: Any) -> None:
    """Without the edges into (or out of) a node, the clean run has the node's corrupt value, which a sweep patches exactly."""
    host = opened(kind)
    graph = edges(host, method=method, **ASKED)
    assert graph.faithfulness([0, len(graph)]) == pytest.approx([0, 1], abs=1e-10)
    nodes: dict[str, Any] = {"sites": ["q", "k", "v", "z", "mlp_in", "mlp_out"], "heads": True, "together": True}
    swapped = {**ASKED, "clean": CORRUPT, "corrupt": CLEAN}
    exact = sweep(host, **nodes, **swapped, progress=False)
    masks = np.stack([without(graph, str(target)) for target in exact.sites])
    circuits = graph.corrupt + graph.faithfulness(masks) * (graph.clean - graph.corrupt)
    np.testing.assert_allclose(circuits, exact.values[:, 0], rtol=0, atol=1e-10)
    assert np.ptp(circuits) > 0.05
    if method == "eap":  # what a sender writes reaches the score through its receivers alone
        node = attribute(host, sites=["z", "mlp_out"], heads=True, together=True, **ASKED)
        total = [np.nansum(graph.scores[graph.senders.index(str(target))]) for target in node.sites]
        np.testing.assert_allclose(total, node.effect[:, 0], rtol=0, atol=1e-6 * np.abs(node.effect).max())


@pytest.mark.parametrize(("kind", "tolerance"), [("GPT2", 1e-6), ("Qwen3", 1e-3), ("GPTNeoX", 1e-6)])
def test_an_edge_is_the_derivative_of_its_path(kind: str, tolerance: float) -> None:
    host = opened(kind)
    graph, step = edges(host, **ASKED), 1e-3
    heads = {point: [Target(Site(1, point), head) for head in (0, 1)] for point in "qkv"}
    receivers = [*heads["q"], *heads["k"], *heads["v"], Target(Site(1, "mlp_in")), Target(Site(1, "resid_post"))]
    senders = [Target(Site(0, "z"), 2), Target(Site(0, "mlp_out")), Target(Site(0, "resid_pre"))]
    for receiver in receivers:
        name = "logits" if receiver.site.point == "resid_post" else str(receiver)
        ahead, back = (
            paths(host, senders=senders, receivers=receiver, alpha=alpha, together=True, progress=False, **ASKED).values[:, 0]
            for alpha in (step, -step)
        )
        names = [str(sender) for sender in senders[:2]] + ["embed"]
        found = [graph.scores[graph.senders.index(sender), graph.receivers.index(name)] for sender in names]
        scale = tolerance * np.nanmax(np.abs(graph.scores))
        np.testing.assert_allclose(found, (ahead - back) / (2 * step), rtol=0, atol=scale, err_msg=name)
    inside = [
        graph.scores[graph.senders.index("blocks.1.z[0]"), graph.receivers.index(f"blocks.1.{name}")] for name in ("q[0]", "mlp_in")
    ]
    assert np.isnan(inside).tolist() == [True, kind == "GPTNeoX"]  # a head comes before its layer's MLP, but not beside it


def test_integrated_edges_out_of_the_embedding_add_up_to_the_whole_effect() -> None:
    """Between both embeddings, the score's derivative is the sum over all receivers; of other senders, by a plain loop."""
    host, steps = opened("MicroGPT"), 20
    graph = edges(host, method="ig", steps=steps, **ASKED)
    assert np.nansum(graph.scores[0]) == pytest.approx(graph.clean - graph.corrupt, rel=1e-3)
    first, z = Site(0, "resid_pre"), Site(0, "z")
    clean, corrupt = (host.capture([first, z], tokens[None]) for tokens in (CLEAN, CORRUPT))
    expected = torch.zeros(clean[z].shape[2], dtype=torch.float64)
    for i in range(steps):
        share, held = (i + 0.5) / steps, list[torch.Tensor]()
        between = (1 - share) * corrupt[first] + share * clean[first]
        with host.hooks({first: lambda _, v=between: v, z: lambda value, held=held: held.append(value) or value}):
            logits = host.logits(CORRUPT[None])[0, -1]
            (slope,) = torch.autograd.grad(logits[ANSWER] - logits[FOIL], held)
        expected += ((clean[z] - corrupt[z]) * slope).sum((0, 1, 3)) / steps
    rows = [graph.senders.index(f"{z}[{head}]") for head in range(len(expected))]
    np.testing.assert_allclose(np.nansum(graph.scores[rows], axis=1), expected, atol=1e-12)


def lens_name(node: Node) -> str:
    names = {
        "embed": "embed",
        "logits": "logits",
        "mlp_out": f"blocks.{node.layer}.mlp_out",
        "mlp_in": f"blocks.{node.layer}.mlp_in",
    }
    point = "z" if node.kind == "attn_head_out" else node.kind[0]
    return names.get(node.kind) or f"blocks.{node.layer}.{point}[{node.head}]"


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX"])
def test_transformer_lens_has_the_same_edges_and_circuits(kind: str) -> None:
    """It knows an edge at every position. Its embedding is without positions, whose change is 0."""
    host = open_host("transformer_lens", make_family(kind))
    bridge: Any = host.model
    tokens = CLEAN[None], CORRUPT[None]
    metric: Any = lambda logits: logits[0, -1, ANSWER] - logits[0, -1, FOIL]  # noqa: E731
    peer = attribution_patch(bridge, *tokens, metric, EdgeAttributionConfig(granularity="edge"))
    expected: dict[tuple[str, str], float] = {}
    for (sender, receiver), value in peer.edge_scores.items():
        edge = lens_name(sender), lens_name(receiver)
        expected[edge] = expected.get(edge, 0.0) + value
    graph = edges(host, **ASKED)
    found = {(edge.sender, edge.receiver): edge.score for edge in graph.top(len(graph))}
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[edge] for edge in expected], [*expected.values()], atol=1e-10)
    for k in (10, 40):
        chosen = {(edge.sender, edge.receiver) for edge in graph.top(k)}
        kept = [(s, r) for s, r in peer.edge_scores if (lens_name(s), lens_name(r)) in chosen]
        assert graph.faithfulness(k)[0] == pytest.approx(faithfulness(bridge, *tokens, metric, kept).recovered, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in HOSTS if name != "torch"])
def test_every_host_has_the_same_graph(name: str) -> None:
    graph, other = edges(opened("Qwen3"), **ASKED), edges(opened("Qwen3", name), **ASKED)
    np.testing.assert_allclose(other.scores, graph.scores, rtol=0, atol=1e-5 * np.nanmax(np.abs(graph.scores)))
    np.testing.assert_allclose(other.faithfulness([10, 40]), graph.faithfulness([10, 40]), atol=1e-5)


def test_architectures_without_edges_say_so() -> None:
    for host, said in (
        (open_host("torch", make_family("Gemma3")), r"blocks.0.attn_out of this architecture is not the sum of its heads"),
        (opened("DeepseekV3"), r"edges need q, k.*has no blocks.0.q: take attribute or paths"),
        (open_host("transformer_lens", make_family("GPTNeoX (sequential)")), "has no resid_mid in layer 0.*use torch"),
    ):
        with pytest.raises(ValueError, match=said):
            edges(host, **ASKED)
    with pytest.raises(ValueError, match="no other method any"):
        edges(opened("GPT2"), steps=3, **ASKED)
    with pytest.raises(ValueError, match="so there is no effect to keep"):
        edges(opened("GPT2"), **{**ASKED, "corrupt": CLEAN}).faithfulness(1)


def test_a_graph_of_several_pairs_is_read_by_networkx_and_drawn(tmp_path: Path) -> None:
    """Pairs may have other lengths, of which only positions with partners change."""
    host, two = opened("Qwen3"), [[5, 7, 8, 11], [5, 9, 10, 8, 11]]
    single = [
        edges(host, clean=clean, corrupt=corrupt, answer=4, foil=9) for clean, corrupt in zip((CLEAN, two[0]), (CORRUPT, two[1]))
    ]
    graph = edges(host, clean=[CLEAN, two[0]], corrupt=[CORRUPT, two[1]], answer=[4, 4], foil=9)
    np.testing.assert_array_equal(graph.pairs, [single[0].scores, single[1].scores])
    alone = sweep(host, sites=Site(0, "resid_pre"), clean=two[0], corrupt=two[1], answer=4, foil=9, together=True, progress=False)
    assert single[1].faithfulness(len(graph)) == pytest.approx(alone.recovered[0], abs=1e-10)
    best = graph.top(3)
    low, high = best[0].interval or (0.0, 0.0)
    assert low < best[0].score < high
    data = networkx.node_link_graph(graph.to_json(12))
    assert data.number_of_edges() == 12
    assert data[best[0].sender][best[0].receiver]["weight"] == best[0].score
    assert abs(best[0].score) >= abs(best[1].score) >= abs(best[2].score)
    drawn = graph.draw(tmp_path / "edges.svg", 12).read_text()
    assert "12 strongest of 82 edges" in drawn
    with pytest.raises(ValueError, match="-1 strongest edges do not exist"):
        graph.top(-1)
