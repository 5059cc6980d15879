"""Steering in a model is what plain torch hooks with the formulas written out would do, and nothing else anywhere."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from families import make_family, move
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mi_route2.adapters import Adapters, AdapterSpec
from mi_route2.hosts.huggingface import TorchHost
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering, Vector
from mi_route2.steering.state import Readings, SteeringState

FIRST, EARLY, MID, LATE = Site(0, "resid_pre"), Site(0, "resid_post"), Site(1, "resid_mid"), Site(1, "resid_post")
QUERY, BOTTLENECK = Site(1, "q"), Site(0, "kept_a", "mlp.down")
QUARANTINES = tuple(Site(layer, "quarantine_out", "mlp.down") for layer in range(2))
SITES = (EARLY, MID, LATE, QUERY, BOTTLENECK)
PIECES = (Piece(0, 0, 6, 3), Piece(1, 0, 5, 2), Piece(2, 0, 6, 4))
"""Three requests in one forward, prompts and generated tokens in each; the second is padded."""


class Model:
    """A tiny model, its widths, and one batch of tokens."""

    def __init__(self) -> None:
        self.host = TorchHost(make_family("Llama"))
        spec = AdapterSpec(kept="lora", rank=4, quarantine_rank=3)
        given = {"spec": spec, "generator": torch.Generator().manual_seed(7)}
        self.adapters: Adapters = move(self.host.attach("blocks.*.mlp.down", **given))
        self.tokens = torch.randint(3, 50, (3, 6), generator=torch.Generator().manual_seed(3))
        self.attention = BatchLayout.of(PIECES).real
        seen = self.host.capture((FIRST, *SITES, *QUARANTINES), self.tokens, self.attention)
        self.shapes = {site: tuple(value.shape[2:]) for site, value in seen.items()}

    def state(self, *specs: Steering | None, **given) -> SteeringState:
        """A state that has admitted requests with these specs, numbered from 0."""
        sites = {"adapter_sites": QUARANTINES, "dtype": torch.float64}
        state = SteeringState(lambda site: self.shapes[site], **(sites | given))
        for request, spec in enumerate(specs):
            state.admit(request, spec)
        return state

    def vector(self, site: Site, seed: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(torch.Size(self.shapes[site]).numel(), generator=generator, dtype=torch.float64)

    def run(self, state: SteeringState, pieces: tuple[Piece, ...] = PIECES) -> tuple[Tensor, Readings]:
        """Logits of the batch with the state's steering at work."""
        state.begin(BatchLayout.of(pieces))
        with torch.no_grad(), self.host.hooks({site: lambda h, s=site: state.at(s, h) for site in state.sites()}):
            logits = self.host.logits(self.tokens, self.attention)
        return logits, state.end()

    def plain(self, edits: Mapping[Site, Callable[[Tensor], Tensor]]) -> Tensor:
        """Logits with plain torch hooks, on modules that are named by hand."""
        with torch.no_grad(), by_hand(self.host.model, edits):
            return self.host.logits(self.tokens, self.attention)


def overwrite(edit: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple[Tensor]) -> None:
    """In place: the block goes on with the very stream that its norm was given."""
    args[0].copy_(edit(args[0].clone()))


@contextmanager
def by_hand(model: nn.Module, edits: Mapping[Site, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    blocks, handles = model.get_submodule("model.layers"), []
    for site, edit in edits.items():
        block = blocks[site.layer]
        module = {
            "resid_mid": lambda block=block: block.post_attention_layernorm,
            "resid_post": lambda block=block: block,
            "q": lambda block=block: block.self_attn.q_proj,
            "kept_a": lambda block=block: block.mlp.down_proj.route.hook_kept_a,
            "quarantine_out": lambda block=block: block.mlp.down_proj.route.hook_quarantine,
        }[site.point]()
        if site.point == "resid_mid":
            handles.append(module.register_forward_pre_hook(partial(overwrite, edit)))
        else:
            handles.append(module.register_forward_hook(lambda _m, _a, out, edit=edit: edit(out)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def tokens_of(pieces: tuple[Piece, ...] = PIECES) -> Iterator[tuple[int, int, bool]]:
    """(row, column, generated) of every real token."""
    for row, piece in enumerate(pieces):
        for column in range(piece.count):
            yield row, column, piece.start + column >= piece.prompt


def each_token(change: Callable[[Tensor, int, int, bool], Tensor]) -> Callable[[Tensor], Tensor]:
    """An edit that puts ``change(token, row, column, generated)`` in the place of every real token."""

    def edit(h: Tensor) -> Tensor:
        h = h.clone()
        for row, column, generated in tokens_of():
            h[row, column] = change(h[row, column], row, column, generated)
        return h

    return edit


def adding(vectors: Mapping[tuple[int, bool], Tensor]) -> Callable[[Tensor], Tensor]:
    """An edit that adds ``vectors[row, generated]``, token by token."""
    return each_token(
        lambda token, row, _column, generated: token + vectors.get((row, generated), torch.zeros_like(token)).view(token.shape)
    )


def close(a: Tensor, b: Tensor) -> bool:
    real = BatchLayout.of(PIECES).real
    return float((a - b)[real].abs().max()) < 1e-12


def test_tiers_add_up_in_each_phase_at_every_kind_of_site(model):
    state, wanted = model.state(), {}
    seeds = count()
    entries = {
        (who, tier): {site: model.vector(site, next(seeds)) for site in SITES}
        for who in ("global", 0, 2)
        for tier in ("base", "prefill", "decode")
    }
    spec = {key: tuple(Steer(site, v / 2, 2.0) for site, v in some.items()) for key, some in entries.items()}
    for tier in ("base", "prefill", "decode"):
        state.set_global(tier, spec["global", tier])
    for request in (0, 2):
        state.admit(request, Steering(*(spec[request, tier] for tier in ("base", "prefill", "decode"))))
    state.admit(1, None)
    for site in SITES:
        vectors = {}
        for row in range(3):
            for generated, tier in ((False, "prefill"), (True, "decode")):
                who = ("global", row) if row != 1 else ("global",)
                vectors[row, generated] = sum(entries[one, some][site] for one in who for some in ("base", tier))
        wanted[site] = adding(vectors)
    assert state.sites() == set(SITES)
    assert close(model.run(state)[0], model.plain(wanted))


def test_clamps_act_last_in_order_and_in_their_phase(model):
    u, w, v = (model.vector(LATE, seed) for seed in (1, 2, 3))
    clamps = (
        Clamp(LATE, u, low=-0.1, high=0.2),
        Clamp(LATE, w, value=0.5, strength=0.7, phase="decode"),
        Clamp(LATE, v, low=1.0, phase="prefill"),
    )
    state = model.state(Steering(base=(Steer(LATE, v),), clamps=clamps), None, Steering(clamps=clamps[:1]))

    def clamped(token: Tensor, row: int, _column: int, generated: bool) -> Tensor:
        token = token + v if row == 0 else token
        for clamp in {0: clamps, 1: (), 2: clamps[:1]}[row]:
            if clamp.phase in ("both", "decode" if generated else "prefill"):
                unit = Vector(clamp.vector).data / Vector(clamp.vector).data.norm()
                p = token @ unit
                token = token + clamp.strength * (p.clamp(*clamp.bounds) - p) * unit
        return token

    assert close(model.run(state)[0], model.plain({LATE: each_token(clamped)}))


def test_dynamic_steering_is_of_generated_tokens_alone(model):
    plain, probe = model.plain({}), model.vector(EARLY, 6)
    for act in (
        lambda state: state.set_tier([Steer(EARLY, model.vector(EARLY, 5))]),
        lambda state: state.override(0, "other"),
        lambda state: state.set_scale(3.0, request=0),
        lambda state: (state.override(0, "own"), state.set_scale(3.0, config="own")),
        lambda state: state.set_monitor(Monitor(EARLY, probe, threshold=1e6, gate_rows=True), request=0),
        lambda state: state.set_monitor(Monitor(EARLY, probe, adds=(Steer(MID, model.vector(MID, 7)),)), request=0),
        lambda state: state.set_monitor(Monitor(EARLY, probe, quarantine="close", prompt=False)),
    ):
        own = Steering(base=(Steer(EARLY, model.vector(EARLY, 1)),))
        state = model.state(own, None, None)
        state.hold("own", own)
        state.hold("other", Steering(decode=(Steer(LATE, model.vector(LATE, 2)),)))
        before, contents = model.run(state)[0], [state.fingerprint(r, decode=False) for r in range(3)]
        act(state)
        after = model.run(state)[0]
        changed = {generated for row, column, generated in tokens_of() if not torch.equal(before[row, column], after[row, column])}
        assert changed == {True}
        assert [state.fingerprint(r, decode=False) for r in range(3)] == contents
        assert torch.equal(before[1:], plain[1:])


def test_the_tier_the_scales_and_the_override_are_the_formula(model):
    own, other, dvec = model.vector(MID, 1), model.vector(MID, 2), model.vector(MID, 3)
    state = model.state()
    state.admit(0, Steering(base=(Steer(MID, own),)))
    state.admit(1, Steering(base=(Steer(MID, own),)))
    state.admit(2, None)
    state.hold("mine", Steering(decode=(Steer(MID, other, 0.5),)))
    state.hold("shared", Steering(base=(Steer(MID, own),)))  # the same row, and no matter of whom it is not the override of
    state.set_scale(0.5, config="shared")
    state.override(0, "shared")
    state.set_scale(3.0, request=0)
    state.override(1, "mine")
    state.set_tier([Steer(MID, dvec)])
    state.set_scale(0.25)
    rows = {(0, False): own, (1, False): own, (0, True): 1.5 * own, (1, True): 0.5 * other}
    vectors = rows | {(row, True): rows.get((row, True), 0) + 0.25 * dvec for row in range(3)}
    assert close(model.run(state)[0], model.plain({MID: adding(vectors)}))
    for _ in range(2):
        state.override(1, None)
    rows[1, True] = own  # of the row that it shares, not of the scale
    vectors |= {(1, True): rows[1, True] + 0.25 * dvec}
    assert close(model.run(state)[0], model.plain({MID: adding(vectors)}))
    state.clear_tier()
    assert state.gain == 1.0
    assert close(model.run(state)[0], model.plain({MID: adding(rows)}))
    state.hold("clamps", Steering(prefill=(Steer(MID, own),), clamps=(Clamp(MID, own, value=3.0),)))  # a scale acts on neither
    with pytest.raises(ValueError, match="the configuration 'clamps' holds no vectors for generated tokens"):
        state.set_scale(0.5, config="clamps")


def test_a_monitor_gates_what_its_formula_says_and_its_own_site_reads_what_came_in(model):
    probe, static, dvec, extra = (model.vector(site, seed) for site, seed in ((EARLY, 1), (EARLY, 2), (LATE, 3), (MID, 4)))
    monitor = Monitor(
        EARLY, probe, 0.3, 0.8, gates=(EARLY, LATE), gate_rows=True, adds=(Steer(MID, extra, 2.0),), mode="attenuate", depth=0.6
    )
    steered = Steering(base=(Steer(EARLY, static),))
    state = model.state(replace(steered, monitors=(monitor,)), None, steered)
    state.set_tier([Steer(LATE, dvec), Steer(MID, extra)])
    scores: dict[int, float] = {}

    def factor(row: int, column: int) -> float:
        return 1 - 0.6 * float(torch.sigmoid(torch.tensor(0.8 * (scores[column] - 0.3), dtype=torch.float64))) if row == 0 else 1.0

    def early(token: Tensor, row: int, column: int, generated: bool) -> Tensor:
        if row == 0:
            scores[column] = float(token @ probe)
        return token if row == 1 else token + static * (factor(row, column) if generated else 1.0)

    def mid(token: Tensor, row: int, column: int, generated: bool) -> Tensor:
        return token + extra + (2 * extra * factor(row, column) if row == 0 else 0) if generated else token

    def late(token: Tensor, row: int, column: int, generated: bool) -> Tensor:
        return token + dvec * factor(row, column) if generated else token

    logits, readings = model.run(state)
    assert close(logits, model.plain({site: each_token(edit) for site, edit in ((EARLY, early), (MID, mid), (LATE, late))}))
    track = readings.of(0)[str(EARLY)]
    assert (track.scores - torch.tensor(list(scores.values()), dtype=torch.float64)).abs().max() < 1e-12
    last = readings.last()[0][str(EARLY)]
    assert last.score == float(track.scores[-1])
    assert last.gate == float(track.gates[-1])
    unsteered = model.host.capture([EARLY], model.tokens, model.attention)[EARLY]
    assert (track.scores - unsteered[0] @ probe).abs().max() < 1e-12  # pristine, though the monitor's own site is steered


def test_a_monitor_opens_and_closes_the_quarantine(model):
    with model.adapters.deployed(), torch.no_grad():
        deployed = model.host.logits(model.tokens, model.attention)
    full, probe = model.plain({}), model.vector(EARLY, 1)
    everywhere = {"quarantined": QUARANTINES, "prompt": True}
    for quarantine, threshold, out in (("close", -1e6, True), ("close", 1e6, False), ("open", -1e6, False), ("open", 1e6, True)):
        first = Site(0, "resid_pre")
        model.shapes[first] = model.shapes[EARLY]
        every = Steering(monitors=(Monitor(first, probe, threshold, quarantine=quarantine, **everywhere),))
        state = model.state(
            every, None, Steering(monitors=(Monitor(EARLY, probe, threshold, quarantine=quarantine, prompt=False),))
        )
        # of request 2 behind the monitor, generated tokens
        logits = model.run(state)[0]
        assert torch.equal(logits[0], deployed[0] if out else full[0])
        assert torch.equal(logits[1, :5], full[1, :5])

        second = each_token(lambda y, row, _column, generated, out=out: y * 0 if row == 2 and generated and out else y)
        assert torch.equal(logits[2], model.plain({QUARANTINES[1]: second})[2])


def cut(pieces: tuple[Piece, ...], at: int) -> list[tuple[Piece, ...]]:
    """The same tokens in two forwards."""
    head = tuple(Piece(p.request, p.start, min(at, p.count), p.prompt) for p in pieces)
    tail = tuple(Piece(p.request, p.start + at, p.count - at, p.prompt) for p in pieces if p.count > at)
    return [head, tail]


def shapes_alone() -> Model:
    """What draws vectors, without a model."""
    small = Model.__new__(Model)
    small.shapes = {MID: (16,), LATE: (16,)}
    return small


def rich(model: Model, seed: int) -> Steering:
    """Something of every kind, by the seed."""
    vector = lambda site, i: model.vector(site, 100 * seed + i)  # noqa: E731
    monitor = Monitor(
        MID, vector(MID, 1), 0.1, gate_rows=bool(seed % 2), adds=(Steer(LATE, vector(LATE, 2)),) if seed % 3 else (), name="a"
    )
    other = Monitor(MID, vector(MID, 3), 0.2, mode="attenuate", depth=0.5, name="b")
    return Steering(
        base=(Steer(MID, vector(MID, 4)),),
        decode=(Steer(LATE, vector(LATE, 5)),),
        clamps=(Clamp(LATE, vector(LATE, 6), low=-0.5, high=0.5, phase=("both", "prefill", "decode")[seed % 3]),),
        monitors=(monitor, other) if seed % 2 else (other,),
    )


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=12)
def test_neither_chunks_nor_neighbors_change_a_bit(seeds, at, extra):
    """Each token of each request comes out the same: whole or in two pieces, alone or with others, in any order of the rows."""
    state, small = SteeringState(lambda site: (16,), dtype=torch.float32), shapes_alone()
    for request, seed in enumerate(seeds):
        state.admit(request, rich(small, seed))
    state.set_tier([Steer(LATE, small.vector(LATE, 7)), Steer(MID, small.vector(MID, 8))])
    if extra:
        state.set_monitor(Monitor(MID, small.vector(MID, 9), gate_rows=extra > 1))
    h = {site: torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(extra)) for site in (MID, LATE)}

    def run(pieces: tuple[Piece, ...]) -> dict[tuple[Site, int, int], Tensor]:
        layout, found = BatchLayout.of(pieces), {}
        state.begin(layout)
        for site in (MID, LATE):
            given = torch.zeros(*layout.positions.shape, 16)
            for row, piece in enumerate(pieces):
                given[row, : piece.count] = h[site][piece.request, piece.start : piece.start + piece.count]
            out = state.at(site, given)
            for row, piece in enumerate(pieces):
                for column in range(piece.count):
                    found[site, piece.request, piece.start + column] = out[row, column]
        state.end()
        return found

    whole = run(PIECES)
    for ways in (cut(PIECES, at), [PIECES[::-1]], [(piece,) for piece in PIECES]):
        found = {}
        for pieces in ways:
            found |= run(pieces)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[key], whole[key]) for key in whole)


SCALES = st.sampled_from([0.0, 0.5, 1.0])


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), SCALES, SCALES, st.booleans())
@settings(max_examples=25)
def test_equal_content_is_equal_action(seeds, first, second, watched):
    state, small = SteeringState(lambda site: (16,)), shapes_alone()
    for request, (seed, scale) in enumerate(zip(seeds, (first, second), strict=True)):
        state.admit(request, rich(small, seed))
        state.set_scale(scale, request=request)
    if watched:
        state.set_monitor(Monitor(MID, small.vector(MID, 9)), request=1)
    h = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(2, 1, 16)
    for decode in (False, True):
        state.begin(BatchLayout.of([Piece(request, 3 if decode else 0, 1, 3) for request in range(2)]))
        outs = [state.at(site, h) for site in (MID, LATE)]
        state.end()
        equal = state.fingerprint(0, decode=decode) == state.fingerprint(1, decode=decode)
        same = all(torch.equal(out[0], out[1]) for out in outs)
        assert same if equal else True
        if seeds[0] == seeds[1] and first == second and not watched:
            assert equal


def test_an_override_a_scale_and_a_monitor_outlive_preemption(model):
    own = Steering(base=(Steer(MID, model.vector(MID, 1)),))
    state = model.state(own, own, own)
    state.hold("other", Steering(base=(Steer(LATE, model.vector(LATE, 2)),)))
    state.override(0, "other")
    state.set_scale(0.5, request=0)
    state.set_monitor(Monitor(MID, model.vector(MID, 3), gate_rows=True), request=0)
    before, content = model.run(state)[0], state.fingerprint(0, decode=True)
    state.preempted(0)
    with pytest.raises(RuntimeError, match="would run unsteered"):
        state.begin(BatchLayout.of(PIECES))
    state.admit(0, own)
    assert state.fingerprint(0, decode=True) == content
    assert torch.equal(model.run(state)[0], before)


def test_hooks_are_at_the_sites_of_what_is_resident(model):
    closing = Monitor(FIRST, model.vector(FIRST, 2), quarantine="close", name="m")
    state = model.state(Steering(base=(Steer(MID, model.vector(MID, 1)),), monitors=(closing,)))
    assert state.sites() == {MID, FIRST, *QUARANTINES}
    state.set_adapter_sites(QUARANTINES[:1])
    assert state.sites() == {MID, FIRST, *QUARANTINES[:1]}
    state.set_monitor(Monitor(LATE, model.vector(LATE, 3), gate_rows=True, gates=()), request=0)
    assert state.sites() == {MID, FIRST, LATE, *QUARANTINES[:1]}
    state.preempted(0)
    assert state.sites() <= {MID}, "what is not resident needs no hook for its monitors"
    state.release(0)
    state.set_global("base", (Steer(LATE, model.vector(LATE, 4)),))
    assert state.sites() == {LATE}
    state.clear_global("base")
    assert state.sites() == set()
    state.hold("other", Steering(base=(Steer(MID, model.vector(MID, 1)),)))
    assert state.sites() == {MID}
    state.drop("other")
    assert state.sites() == set()


def test_what_acts_on_a_prompt_is_counted_at_its_own_sites(model):
    prompt, generated = (Steer(site, model.vector(site, seed)) for seed, site in enumerate((MID, LATE)))
    state = model.state(Steering(prefill=(prompt,)), Steering(decode=(generated,)), None)
    assert [state.prompt_sites(request) for request in range(3)] == [{MID}, set(), set()]
    state.admit(3, Steering(clamps=(Clamp(EARLY, model.vector(EARLY, 3), low=0.0, phase="prefill"),)))
    assert state.prompt_sites(3) == {EARLY}


def test_a_digest_follows_what_is_changed(model):
    state = model.state(Steering(base=(Steer(MID, model.vector(MID, 1)),)))
    before = state.fingerprint(0, decode=True)
    state.set_monitor(Monitor(MID, model.vector(MID, 3), gate_rows=True), request=0)
    assert state.fingerprint(0, decode=True) != before


def test_a_spec_that_can_never_be_admitted_is_refused_before(model):
    narrow = Steering(monitors=(Monitor(MID, torch.ones(3), name="m"),))
    with pytest.raises(ValueError, match="3"):
        model.state().check(narrow)
    state, vector = model.state(rows=1), model.vector(MID, 1)
    state.hold("first", Steering(base=(Steer(MID, vector),)))
    with pytest.raises(RuntimeError, match="row"):
        state.hold("second", Steering(base=(Steer(MID, 2 * vector),)))
    assert state.configurations == ("first",)
