"""Attribution is the sweep's derivative; path patching is what plain hooks say of the direct path; a trained model is read."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import HEADS, LAYERS, SPECS, VOCAB, make_family, move
from patched_by_hand import ByHand
from torch import Tensor
from torch.nn.functional import cross_entropy

from mi_route2.architectures import POINTS
from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.patching import Grid, Target, attribute, paths, sweep
from mi_route2.patching.question import CleanRun
from mi_route2.sites import Site
from studies.environments.micro.model import MicroGPT
from studies.environments.micro.settings import MicroConfig

ANSWER, FOIL, LENGTH = 4, 9, 5
CLEAN, CORRUPT = (torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": ANSWER, "foil": FOIL}


@cache
def adapted(family: str, name: str = "torch") -> tuple[Host, ByHand]:
    model = make_family(family)
    host = open_host(name, model)
    given: Any = {"spec": SPECS["lora"], "generator": torch.Generator().manual_seed(7)}
    adapters = move(host.attach("blocks.*", **given))
    return host, ByHand(model, family, adapters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_estimate_of_a_half_precision_model_rounds_no_difference_and_no_product(dtype: torch.dtype) -> None:
    """It is the product in float64 of the model's own values and slopes, which are in half precision."""
    host = open_host("torch", make_family("GPT2", dtype))
    site, exposed = Site(0, "resid_post"), list[Tensor]()
    clean, corrupt = (host.capture([site], tokens[None])[site][0].double() for tokens in (CLEAN, CORRUPT))
    with host.hooks({site: exposed.append}):
        logits = host.logits(CORRUPT[None])[0, -1].double()
        slope = torch.autograd.grad(logits[ANSWER] - logits[FOIL], exposed)[0][0].double()
    estimate = attribute(host, sites=site, **ASKED)
    np.testing.assert_allclose(estimate.effect[0], ((clean - corrupt) * slope).sum(1).numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "step", "tolerance"),
    [("GPT2", 1e-4, 1e-6), ("GPTNeoX", 1e-4, 1e-6), ("MicroGPT", 1e-4, 1e-6), ("Qwen3", 3e-3, 1e-3), ("Gemma3", 3e-3, 1e-3)],
)
def test_attribution_is_the_derivative_of_the_sweep(family: str, step: float, tolerance: float) -> None:
    """``d score(alpha) / d alpha`` at 0, by a central difference of the exact sweep in float64.

    The root-mean-square norms of transformers are float32 whatever the model, so that a small step would drown in rounding.
    """
    host, _ = adapted(family)
    points = [point for point in POINTS if (family, point) != ("GPTNeoX", "resid_mid")]
    sites = [*points, "blocks.0.attn.v.*", "blocks.1.attn.o.*"]
    estimate = attribute(host, sites=sites, **ASKED)
    ahead, back = (sweep(host, sites=sites, alpha=alpha, progress=False, **ASKED) for alpha in (step, -step))
    slope = (ahead.values - back.values) / (2 * step)
    np.testing.assert_allclose(estimate.effect, slope, rtol=0, atol=tolerance * np.abs(slope).max())
    assert (estimate.kind, estimate.clean, estimate.alpha) == ("attribution", pytest.approx(ahead.clean), 1.0)
    half = attribute(host, sites=sites, **{**ASKED, "alpha": 0.5})
    np.testing.assert_allclose(half.effect, estimate.effect / 2, atol=1e-12)


@pytest.mark.parametrize("metric", ["logprob", "kl"])
def test_attribution_of_other_metrics_by_head_and_together(metric: str) -> None:
    host, _ = adapted("GPT2")
    asked = {
        **ASKED,
        "metric": metric,
        "foil": None,
        "answer": ANSWER if metric == "logprob" else None,
        "sites": "z",
        "heads": True,
    }
    ahead, back = (sweep(host, alpha=alpha, progress=False, **asked) for alpha in (1e-4, -1e-4))
    slope = (ahead.values - back.values) / 2e-4
    estimate = attribute(host, **asked)
    np.testing.assert_allclose(estimate.effect, slope, rtol=0, atol=1e-6 * np.abs(slope).max())
    together = attribute(host, together=True, **asked)
    np.testing.assert_allclose(together.effect[:, 0], estimate.effect.sum(1), atol=1e-12)


@pytest.mark.parametrize("name", [name for name in HOSTS if name != "torch"])
def test_attribution_on_other_hosts(name: str) -> None:
    expected = attribute(adapted("Qwen3")[0], sites="*", **ASKED)
    found = attribute(adapted("Qwen3", name)[0], sites="*", **ASKED)
    scale = np.abs(expected.effect).max()
    # The bridge's attention is eager, whose softmax is float32.
    assert np.abs(found.effect - expected.effect).max() < (1e-10 if name == "nnsight" else 1e-5) * scale


@pytest.mark.parametrize("metric", ["logit_diff", "kl"])
def test_attribution_has_its_gradient_in_any_mode_of_torch(metric: str) -> None:
    host, _ = adapted("MicroGPT")
    asked: dict[str, Any] = (
        {**ASKED, "sites": "resid_pre"} if metric == "logit_diff" else {"corrupt": CORRUPT, "sites": "resid_pre"}
    )
    truth = attribute(host, metric=metric, **{**asked, "clean": CLEAN}).values
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            run = CleanRun.capture(host, CLEAN, "resid_pre")
            for clean in (CLEAN, run):
                np.testing.assert_array_equal(attribute(host, metric=metric, **{**asked, "clean": clean}).values, truth)
        np.testing.assert_array_equal(attribute(host, metric=metric, **{**asked, "clean": run}).values, truth)


def test_attribution_leaves_a_frozen_model_as_it_was() -> None:
    model = make_family("Qwen3").requires_grad_(False)
    frozen = attribute(open_host("torch", model), sites=["resid_mid", "z"], **ASKED)
    moving = attribute(open_host("torch", make_family("Qwen3")), sites=["resid_mid", "z"], **ASKED)
    np.testing.assert_allclose(frozen.values, moving.values, atol=1e-12)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def path_by_hand(hand: ByHand, sender: Target, position: int, receivers: list[Target], clean: Any, corrupt: Any) -> float:
    """Two forwards under plain hooks, with what is frozen written out here once more; both runs' values are given."""
    site = sender.site
    layer, inside = site.layer, "mlp" if "mlp" in f"{site.linear}{site.point}" else "attn"
    if site.point.startswith("resid"):
        inside = {"resid_pre": "before", "resid_mid": "attn", "resid_post": "mlp"}[site.point]

    def behind(other: int, part: str) -> bool:
        order = ["before", "attn", "mlp"]
        return (other, order.index(part)) > (layer, order.index(inside))

    taken: dict[Site, Tensor] = {}
    with ExitStack() as stack:
        for target in receivers:
            hand.hook(stack, target.site, lambda value, site=target.site: taken.__setitem__(site, value[0].clone()))
        for other in range(LAYERS):
            for part in ("attn", "mlp"):
                if behind(other, part):
                    held = corrupt[Site(other, f"{part}_out")][None]
                    hand.hook(stack, Site(other, f"{part}_out"), lambda _value, held=held: held)

        def write(value: Tensor) -> Tensor:
            new = value.clone()
            part = slice(None) if sender.head is None else sender.head
            new[0, position, part] = clean[site][position, part]
            return new

        hand.hook(stack, site, write)
        hand.run(CORRUPT)
    with ExitStack() as stack:
        for target in receivers:

            def put(value: Tensor, target: Target = target) -> Tensor:
                new = value.clone()
                part = slice(None) if target.head is None else (slice(None), target.head)
                new[0][part] = taken[target.site][part]
                return new

            hand.hook(stack, target.site, put)
        logits = hand.run(CORRUPT)
    return float(logits[ANSWER] - logits[FOIL])


SENDERS = [
    Target(Site(0, "z"), 1),
    Target(Site(0, "attn_out")),
    Target(Site(0, "mlp_in")),
    Target(Site(0, "mlp_out")),
    Target(Site(0, "v")),
    Target(Site(0, "resid_pre")),
    Target(Site(0, "kept_a", "attn.o")),
    Target(Site(0, "quarantine_out", "mlp.down")),
]
RECEIVERS = [
    [Target(Site(1, "q"), 2)],
    [Target(Site(1, "k")), Target(Site(1, "v"), 1)],
    [Target(Site(1, "mlp_in"))],
    [Target(Site(1, "attn_out"))],
    [Target(Site(1, "q")), Target(Site(1, "resid_post"))],
]


CASES = [("Qwen3", receivers) for receivers in RECEIVERS] + [("GPT2", RECEIVERS[1]), ("Gemma3", RECEIVERS[4])]


@pytest.mark.parametrize(("family", "receivers"), CASES, ids=[f"{family} {' '.join(map(str, into))}" for family, into in CASES])
def test_a_path_is_what_plain_hooks_say_of_it(family: str, receivers: list[Target]) -> None:
    host, hand = adapted(family)
    grid = paths(host, senders=SENDERS, receivers=receivers, progress=False, **ASKED)
    runs = hand.read(CLEAN), hand.read(CORRUPT)
    for row, sender in zip(grid.values, SENDERS):
        for position in (1, LENGTH - 1):
            assert row[position] == pytest.approx(path_by_hand(hand, sender, position, receivers, *runs), abs=1e-10), sender
    assert np.abs(grid.effect).max() > 1e-4
    assert grid.kind == "path"
    one = paths(host, senders=SENDERS, receivers=receivers, batch=1, progress=False, **{**ASKED, "positions": [2]})
    np.testing.assert_allclose(one.values[:, 0], grid.values[:, 2], rtol=0, atol=1e-12)


def test_the_direct_path_to_the_logits_is_a_sum_in_the_last_stream() -> None:
    """An attention's or MLP's direct effect: its change, added to the corrupt run's last stream, normalised and unembedded."""
    host, hand = adapted("Qwen3")
    model: Any = host.model
    here, source = hand.read(CORRUPT), hand.read(CLEAN)
    grid = paths(host, senders=["attn_out", "mlp_out"], receivers=Site(1, "resid_post"), progress=False, **ASKED)
    for target, row in zip(grid.sites, grid.values):
        stream = here[Site(1, "resid_post")][-1] + (source[target.site] - here[target.site])[-1]
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(stream))
        assert row[-1] == pytest.approx(float(logits[ANSWER] - logits[FOIL]), abs=1e-10)
        assert row[:-1] == pytest.approx(grid.corrupt, abs=1e-12)  # at other positions the stream leads nowhere directly
    together = paths(host, senders=["attn_out", "mlp_out"], receivers=Site(1, "resid_post"), together=True, progress=False, **ASKED)
    assert together.values[:, 0] == pytest.approx(grid.values[:, -1], abs=1e-12)


def test_a_path_can_be_received_at_some_positions() -> None:
    host, _ = adapted("Qwen3")
    given: Any = {"senders": Site(0, "mlp_out"), "receivers": Site(1, "k"), "progress": False, **ASKED}
    every, some = paths(host, **given), paths(host, received=[1, 2], **given)
    assert some.values[0, [1, 2]] == pytest.approx(every.values[0, [1, 2]], abs=1e-12)  # an MLP acts at its own position
    assert some.values[0, [0, 3, 4]] == pytest.approx(every.corrupt, abs=1e-12)
    assert np.abs(every.effect).min() > 1e-6
    for name in HOSTS:
        grid = paths(adapted("Qwen3", name)[0], **given)
        assert grid.values == pytest.approx(every.values, abs=1e-10 if name != "transformer_lens" else 1e-5)


RECALL = MicroConfig(vocab=12, d=32, layers=2, heads=4, mlp=64, context=8)


def recall(n: int, generator: torch.Generator) -> Tensor:
    """A token, five of noise, and the question (0) for the first."""
    tokens = torch.randint(1, RECALL.vocab, (n, 7), generator=generator)
    tokens[:, -1] = 0
    return tokens


@cache
def trained() -> MicroGPT:
    generator = torch.Generator().manual_seed(0)
    model = MicroGPT(RECALL, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        tokens = recall(32, generator)
        loss = cross_entropy(model(tokens)[:, -1], tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05
    return model.double().eval()


def question() -> dict[str, Any]:
    corrupt, clean = recall(2, torch.Generator().manual_seed(5))
    clean = torch.cat([clean[:1], corrupt[1:]])
    assert clean[0] != corrupt[0]
    return {"clean": clean, "corrupt": corrupt, "answer": int(clean[0]), "foil": int(corrupt[0]), "progress": False}


def test_a_trained_model_shows_where_it_keeps_what_it_recalls() -> None:
    """The token stands in the stream at its own position, until attention has moved it to the last one."""
    host = open_host("torch", trained())
    grid = sweep(host, sites=["resid_pre", "resid_post"], **question())
    assert grid.clean > 5
    assert grid.corrupt < -5
    assert grid.recovered[0, 0] == pytest.approx(1, abs=1e-12)
    assert grid.recovered[-1, -1] == pytest.approx(1, abs=1e-12)
    assert np.abs(grid.recovered[:, 1:-1]).max() < 0.5
    peak = grid.argabs
    assert peak.position in (0, 6)
    assert peak.value == pytest.approx(grid.argmax.value)
    assert {cell.position for cell in grid.top(4)} <= {0, 6}


def test_alpha_moves_the_best_site_from_corrupt_to_clean() -> None:
    host = open_host("torch", trained())
    scores = [sweep(host, sites=Site(0, "resid_pre"), positions=0, alpha=alpha, **question()) for alpha in (0.0, 0.5, 1.0)]
    low, middle, high = (float(grid.values[0, 0]) for grid in scores)
    assert low == scores[0].corrupt
    assert low < middle < high
    assert high == pytest.approx(scores[0].clean, abs=1e-12)


def test_attribution_ranks_cells_of_a_trained_model_as_the_sweep_does() -> None:
    host = open_host("torch", trained())
    exact = sweep(host, sites=["z", "v", "attn_out"], heads=True, **question())
    given = {key: value for key, value in question().items() if key != "progress"}
    estimate = attribute(host, sites=["z", "v", "attn_out"], heads=True, **given)
    assert len(exact.sites) == LAYERS * (2 * HEADS + 1)
    assert exact.rank_correlation(exact) == pytest.approx(1)
    assert 0.5 < estimate.rank_correlation(exact) <= 1
    with pytest.raises(ValueError, match="different sites or positions"):
        exact.rank_correlation(sweep(host, sites="z", **question()))
    nothing = sweep(host, sites=["z", "v", "attn_out"], heads=True, alpha=0.0, **question())
    for one, other in ((exact, nothing), (nothing, exact)):
        with pytest.raises(ValueError, match="has one effect in all of its cells, so they have no ranks"):
            one.rank_correlation(other)


def rank_of_answer(logits: Tensor) -> float:
    """No gradient: how many tokens are likelier than the answer."""
    return float((logits > logits[..., ANSWER]).sum())


def margin(logits: Tensor) -> Tensor:
    """The answer against all other tokens: no metric of the package says that."""
    return logits[..., ANSWER] - torch.cat([logits[..., :ANSWER], logits[..., ANSWER + 1 :]], -1).logsumexp(-1)


@pytest.mark.parametrize("metric", [margin, rank_of_answer, lambda logits: logits[2].sin().item()])
@pytest.mark.parametrize("how", ["resumed", "whole"])
def test_a_metric_of_ones_own_scores_cells_as_plain_hooks_do(metric: Any, how: str) -> None:
    """Every cell against one forward under plain torch hooks in float64, scored by the same function."""
    host, hand = adapted("Qwen3")
    sites = [Site(0, "resid_pre"), Site(1, "z"), Site(1, "kept_a", "mlp.down")]
    grid = sweep(host, clean=CLEAN, corrupt=CORRUPT, sites=sites, metric=metric, how=how, progress=False)
    read, score = hand.read(CLEAN[None]), lambda logits: float(metric(logits.double()))
    expected = [
        [score(hand.logits(CORRUPT[None], site, [p], read[site][[p]])) for p in range(LENGTH)] for site in sites
    ]  # fmt: skip
    np.testing.assert_allclose(grid.values, expected, rtol=0, atol=1e-9)
    assert (grid.clean, grid.corrupt) == pytest.approx((score(hand.run(CLEAN[None])), score(hand.run(CORRUPT[None]))), abs=1e-9)
    assert grid.metric == f"function {metric.__name__}"


def test_a_metric_of_ones_own_has_paths_and_attribution_where_torch_knows_its_slope() -> None:
    host, _ = adapted("Qwen3")
    named: dict[str, Any] = {"answer": ANSWER, "foil": FOIL}
    own: dict[str, Any] = {"metric": lambda logits: logits[..., ANSWER] - logits[..., FOIL]}
    given: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT}
    for call, asked in (
        (attribute, {"sites": ["z", "resid_mid"]}),
        (paths, {"senders": Site(0, "mlp_out"), "receivers": Site(1, "k"), "progress": False}),
    ):
        np.testing.assert_allclose(
            call(host, **given, **asked, **own).values, call(host, **given, **asked, **named).values, atol=1e-12
        )
    ahead, back = (sweep(host, **given, sites="z", metric=margin, alpha=alpha, progress=False) for alpha in (3e-3, -3e-3))
    estimate, slope = attribute(host, **given, sites="z", metric=margin), (ahead.values - back.values) / 6e-3
    np.testing.assert_allclose(estimate.effect, slope, rtol=0, atol=1e-3 * np.abs(slope).max())
    for blind in (rank_of_answer, lambda logits: margin(logits).detach()):
        with pytest.raises(ValueError, match=r"has no gradient.*sweep"):
            attribute(host, **given, sites="z", metric=blind)


def test_a_metric_of_ones_own_says_what_does_not_fit() -> None:
    host, _ = adapted("Qwen3")
    given: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "sites": "z", "progress": False}
    for asked, said in (
        ({"metric": margin, "answer": 4}, "takes no answer: leave it out"),
        ({"metric": margin, "foil": 4}, "takes no foil: leave it out"),
        ({"metric": lambda logits: logits}, r"returned a tensor of shape \[\d+\].*one number"),
        ({"metric": lambda logits: logits.numpy()}, r"returned a tensor of shape \[\d+\].*one number"),
        ({"metric": lambda logits: logits[0] + 1j}, "returned a complex.*one number"),
        ({"metric": lambda logits: None}, "returned a NoneType.*one number"),
        ({"metric": lambda logits: float("nan")}, "returned nan.*finite"),
        ({"metric": "margin"}, "unknown metric 'margin': choose among logit_diff, logprob, kl, or give a function"),
        ({"metric": "function margin"}, "give the function itself"),
    ):
        with pytest.raises(ValueError, match=said):
            sweep(host, **given, **asked)
    with pytest.raises(TypeError, match="sweep: metric must be"):
        sweep(host, **given, metric=3)


def test_a_grid_of_a_metric_of_ones_own_loads_under_its_name(tmp_path: Path) -> None:
    """A function called like a metric of the package is not taken for it, in the file too; only its name is kept."""

    def kl(logits: Tensor) -> Tensor:
        return margin(logits)

    host, _ = adapted("Qwen3")
    grid = sweep(host, clean=CLEAN, corrupt=CORRUPT, sites="z", metric=kl, progress=False)
    grid.save(tmp_path / "own.safetensors")
    again = Grid.load(tmp_path / "own.safetensors")
    np.testing.assert_array_equal(again.values, grid.values)
    assert again.metric == again.to_json()["metric"] == "function kl"
    assert (again.grader, again.recovered.tolist()) == (grid.grader, grid.recovered.tolist())
    with pytest.raises(ValueError, match="saved by name only"):
        again.grader(torch.zeros(1, VOCAB), torch.zeros(VOCAB))
    grid.heatmap(tmp_path / "own.svg")
