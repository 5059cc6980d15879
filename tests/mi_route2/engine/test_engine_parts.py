"""The engine's parts against brute force: who runs, where keys and values are, what is shared, what is drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from families import SPECS, make_family
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mi_route2.engine.cache import SHELF, Acts, Prefixes, Saved, Slots
from mi_route2.engine.engine import Engine
from mi_route2.engine.request import Request
from mi_route2.engine.sampling import Sampling, choose
from mi_route2.engine.scheduler import Scheduler, urgency
from mi_route2.hosts import open_host
from mi_route2.patching.patches import Patch
from mi_route2.sites import Site
from mi_route2.steering.plan import BatchLayout, Piece
from mi_route2.steering.specs import Monitor, Steer, Steering


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it."""

    arrival: int
    priority: int
    prompt: int
    most: int
    computed: int = 0
    generated: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated


class Scheduling(RuleBasedStateMachine):
    """Submit, step, cancel and put back at will: the promises of the scheduler hold after each, and everybody ends."""

    @initialize(
        rows=st.integers(1, 4), spare=st.integers(0, 6), chunk=st.integers(4, 8), room=st.none() | st.integers(24, 40),
        grain=st.sampled_from([1, 4]),
    )  # fmt: skip
    def start(self, rows: int, spare: int, chunk: int, room: int | None, grain: int) -> None:
        self.scheduler: Scheduler[Job] = Scheduler(rows=rows, budget=rows + grain - 1 + spare, chunk=chunk, room=room, grain=grain)
        self.jobs: list[Job] = []
        self.arrivals = 0
        self.full = False

    @rule(prompt=st.integers(1, 14), most=st.integers(1, 8), priority=st.integers(0, 2))
    def submit(self, prompt: int, most: int, priority: int) -> None:
        job = Job(self.arrivals, priority, prompt, most)
        self.arrivals += 1
        self.jobs.append(job)
        self.scheduler.add(job)

    @rule(data=st.data())
    @precondition(lambda self: self.jobs)
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(job)
        self.scheduler.remove(job)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running)
    def put_back(self, data: st.DataObject) -> None:
        self.scheduler.put_back(data.draw(st.sampled_from(self.scheduler.running)))

    @rule()
    def somebody_else_holds_the_steering_rows(self) -> None:
        self.full = not self.full

    @rule()
    def step(self) -> None:
        self.take(lambda job: "wait" if self.full and job.arrival % 2 else "run")

    def take(self, admit: Callable[[Job], str]) -> None:
        scheduler = self.scheduler
        before = list(scheduler.running)
        put_back: list[Job] = []
        plan = scheduler.plan(admit, put_back.append)  # pyright: ignore[reportArgumentType]
        assert put_back == plan.preempted
        assert all(job in before for job in put_back)
        admitted = [job for job in scheduler.running if job not in before]
        assert sum(count for _, count in plan.pieces) <= scheduler.budget
        assert len({id(job) for job, _ in plan.pieces}) == len(plan.pieces)
        for job, count in plan.pieces:
            assert job in scheduler.running
            assert 1 <= count <= scheduler.chunk
            end = job.computed + count
            assert end == job.known or (end < job.known and end % scheduler.grain == 0)
        chosen = [job for job, _ in plan.pieces]
        assert all(job in chosen for job in scheduler.running if job.known - job.computed == 1)
        if scheduler.room is not None and len(scheduler.running) > 1:
            assert sum(job.computed for job in scheduler.running) + sum(count for _, count in plan.pieces) <= scheduler.room
        if admitted:  # whoever still waits is less urgent than all that came in, or was put back in this very step
            assert all(urgency(job) > max(map(urgency, admitted)) or job in put_back for job in scheduler.waiting)
        if scheduler.waiting and (first := scheduler.waiting[0]) not in put_back and len(scheduler.running) == scheduler.rows:
            budget = sum(count for _, count in plan.pieces) == scheduler.budget
            assert budget or all(job.priority >= first.priority for job in scheduler.running)
        for job, count in plan.pieces:
            job.computed += count
            if job.computed == job.known:
                job.generated += 1
                if job.generated == job.most:
                    scheduler.remove(job)
                    self.jobs.remove(job)

    @invariant()
    def each_is_in_one_place(self) -> None:
        if not hasattr(self, "jobs"):
            return
        both = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(map(id, both)) == sorted(map(id, self.jobs))
        assert self.scheduler.waiting == sorted(self.scheduler.waiting, key=urgency)
        assert len(self.scheduler.running) <= self.scheduler.rows

    def teardown(self) -> None:
        for _ in range(600):
            if not getattr(self, "jobs", ()):
                return
            self.take(lambda _: "run")
        raise AssertionError(f"{len(self.jobs)} requests never end")


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Keeping(RuleBasedStateMachine):
    """Rows of keys and values against a dictionary of plain tensors."""

    LAYERS, ROWS, HEADS, WIDTH = 2, 4, 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(self.LAYERS, self.ROWS, self.HEADS, self.WIDTH, most=400, dtype=torch.float64, start=4)
        self.held: dict[int, torch.Tensor] = {}
        self.out: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def drawn(self, count: int) -> torch.Tensor:
        return torch.randn(self.LAYERS, 2, self.HEADS, count, self.WIDTH, generator=self.generator, dtype=torch.float64)

    @rule(length=st.integers(1, 80))
    @precondition(lambda self: len(self.held) < self.ROWS)
    def take(self, length: int) -> None:
        row = self.slots.take(length)
        assert row not in self.held
        assert length <= self.slots.capacity(row) < max(4 * length, 5)
        self.held[row] = self.drawn(0)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def write(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.held)))
        first = self.fitted(first, self.held[first].shape[3] + 5)
        shelf = [row for row in sorted(self.held) if row // SHELF == first // SHELF]
        fit = [row for row in shelf if self.held[row].shape[3] + 5 <= self.slots.capacity(row)]
        rows = data.draw(st.lists(st.sampled_from(fit), min_size=1, unique=True))
        aligned = data.draw(st.booleans())
        pieces = [Piece(row, self.held[row].shape[3], data.draw(st.integers(1, 5)), 1) for row in rows]
        layout = BatchLayout.of(pieces)
        width = layout.positions.shape[1]
        view = self.slots.view(layout, rows, aligned=aligned)
        new = torch.stack([self.drawn(width) for _ in rows])
        for layer in range(self.LAYERS):
            read = view.update(new[:, layer, 0], new[:, layer, 1], layer)
            for i, piece in enumerate(pieces):
                for which, found in enumerate(read):
                    whole = torch.cat([self.held[piece.request], new[i][..., : piece.count, :]], 3)[layer, which]
                    assert torch.equal(found[i, :, : whole.shape[1]], whole)
        for i, piece in enumerate(pieces):
            # every real token reads all up to itself, and nothing of the row's other content
            allowed = view.allowed[i, 0, : piece.count]
            assert torch.equal(
                allowed, torch.arange(allowed.shape[1]) <= torch.arange(piece.start, piece.start + piece.count)[:, None]
            )
            self.held[piece.request] = torch.cat([self.held[piece.request], new[i][..., : piece.count, :]], 3)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def free(self, data: st.DataObject) -> None:
        self.freed(*data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True)))

    def freed(self, *rows: int) -> None:
        moved = self.slots.free(*rows)
        for row in rows:
            del self.held[row]
        for old, new in moved.items():
            self.held[new] = self.held.pop(old)

    def fitted(self, row: int, length: int) -> int:
        """Move a row to a longer one if it must be, as the engine does."""
        if length <= self.slots.capacity(row):
            return row
        new = self.slots.move(row, length, self.held[row].shape[3])
        self.held[new] = self.held[row]
        self.freed(row)
        return new

    @invariant()
    def memory_follows_what_is_in_use_and_the_rest_is_zero(self) -> None:
        position = self.LAYERS * 2 * self.HEADS * self.WIDTH * 8
        assert self.slots.used == len(self.held)
        assert self.slots.bytes <= 4 * position * sum(self.slots.capacity(row) for row in self.held)
        for row, held in self.held.items():
            assert not self.slots.save(row, self.slots.capacity(row), held.shape[3] + 5).data.any()

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def save(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        saved = self.slots.save(row, self.held[row].shape[3])
        assert torch.equal(saved.data, self.held[row])
        self.out.append(saved.data)

    @rule(data=st.data())
    @precondition(lambda self: self.held and self.out)
    def load(self, data: st.DataObject) -> None:
        row, saved = data.draw(st.sampled_from(sorted(self.held))), data.draw(st.sampled_from(self.out))
        if self.held[row].shape[3] <= saved.shape[3] <= self.slots.capacity(row):
            self.slots.load(row, Saved(saved))
            self.held[row] = saved


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


DIGESTS = st.sampled_from([b"", b"a", b"b"])


@settings(deadline=None)
@given(
    acting=st.lists(DIGESTS, min_size=24, max_size=24), other=st.lists(DIGESTS, min_size=24, max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=6), patched=st.sets(st.integers(0, 23), max_size=2),
)  # fmt: skip
def test_keys_are_equal_exactly_where_all_that_acted_so_far_is(
    acting: list[bytes], other: list[bytes], cuts: list[int], patched: set[int]
) -> None:
    """Against a list of what acted on each position; told in any pieces it is the same."""

    def keys(digests: list[bytes], where: set[int], told: list[int]) -> list[bytes]:
        acts, found = Acts(patches=[(position, b"x") for position in sorted(where)]), []
        for position in sorted({*told, *(i for i in range(24) if i == 0 or digests[i] != digests[i - 1])}):
            if position < 24:
                acts.steered(position, digests[position])
        Prefixes(8, 1).extend(found, list(range(24)), acts, 3)
        return found

    mine, again, theirs = keys(acting, patched, cuts), keys(acting, patched, []), keys(other, set(), [])
    assert mine == again
    for block, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        stop = (block + 1) * 8
        alike = acting[:stop] == other[:stop] and not any(position < stop for position in patched)
        assert (one == two) is alike


def test_a_row_that_is_taken_again_holds_nothing_of_before() -> None:
    slots = Slots(2, 4, 1, 3, most=16, dtype=torch.float64, start=4)
    rows = [slots.take(4) for _ in range(3)]
    slots.load(rows[-1], Saved(torch.full((2, 2, 1, 4, 3), float("nan"), dtype=torch.float64)))
    slots.free(rows[-1])
    assert not slots.save(slots.take(4), 4).data.any(), "a masked NaN would still reach the sum"


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 2, b""),
        (0, 3, b"s2:3:a"),
        (1, 5, b"s1:4:a"),
        (4, 8, b"s0:2:a|s3:4:b|p1:x"),
        (6, 9, b"s1:3:b"),
        (5, 8, b"s0:1:a|s2:3:b|p0:x"),
    ],
)
def test_a_fingerprint_has_what_acted_where_it_acted(start: int, stop: int, expected: bytes) -> None:
    acts = Acts(patches=[(5, b"x")])
    for position, digest in ((2, b"a"), (6, b""), (7, b"b")):
        acts.steered(position, digest)
    assert acts.fingerprint(start, stop) == expected


def test_prefixes_hold_what_they_may_and_lose_the_oldest() -> None:
    block = Saved(torch.zeros(1, 2, 1, 4, 1))
    held = Prefixes(4, 3 * block.data.nbytes)
    for key in (b"a", b"b", b"c"):
        held.keep([key], lambda _: block)
    assert len(held.find([b"a", b"x", b"b"])) == 1
    assert (held.hits, held.misses) == (1, 2)
    held.keep([b"d"], lambda _: block)  # b is the oldest: a was used since
    assert [len(held.find([key])) for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    assert (len(held), held.bytes) == (3, 3 * block.data.nbytes)
    held.clear()
    assert (len(held), held.bytes) == (0, 0)
    held.budget += block.data.nbytes
    for chain in ([b"stem", b"a1", b"a2"], [b"stem", b"b1", b"b2"]):
        held.keep(chain, lambda _: block)
    assert (len(held.find([b"stem", b"a1", b"a2"])), len(held)) == (2, 4)  # of the older chain its end has left


LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


def by_hand(logits: torch.Tensor, how: Sampling, uniform: float) -> int:
    """Sort, cut, walk along the vocabulary until the uniform is passed."""
    probabilities = (logits / how.temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept, mass = [], 0.0
    for token in ranked[: how.top_k or None]:
        if mass >= how.top_p or probabilities[token] < how.min_p * probabilities[ranked[0]]:
            break
        kept.append(token)
        mass += probabilities[token]
    total, passed = sum(probabilities[token] for token in kept), 0.0
    for token in sorted(kept):
        passed += probabilities[token] / total
        if uniform < passed:
            return token
    return max(kept)


@settings(deadline=None)
@given(
    temperature=st.floats(0.2, 3), top_k=st.integers(0, 40), top_p=st.floats(0.05, 1), uniform=st.floats(0, 1, exclude_max=True),
    row=st.integers(0, 4), min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
)  # fmt: skip
def test_a_drawn_token_is_that_of_the_walk_by_hand(
    temperature: float, top_k: int, top_p: float, uniform: float, row: int, min_p: float
) -> None:
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    others = [Sampling(), Sampling(temperature=0.7), how]
    rows = torch.stack([LOGITS[0], LOGITS[1], LOGITS[row]])
    chosen, values = choose(rows, others, [0.0, 0.3, uniform])
    assert chosen[0] == LOGITS[0].argmax()
    # on an edge of the cumulative sum rounding decides
    assert int(chosen[2]) in {by_hand(LOGITS[row], how, u) for u in (uniform - 1e-12, uniform, uniform + 1e-12)}
    assert torch.equal(values, rows.gather(1, chosen[:, None])[:, 0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("temperature", [1e-200, 1e-308, 5e-324])
def test_a_temperature_near_0_is_greedy_also_where_a_quotient_is_infinite(temperature: float, sign: float) -> None:
    """Logits of one sign: all quotients are infinite, and their softmax is no number."""
    rows = sign * LOGITS.abs()
    for how in (Sampling(temperature=temperature), Sampling(temperature=temperature, top_k=3, top_p=0.5)):
        assert torch.equal(choose(rows, [how] * 5, [0.3] * 5)[0], rows.argmax(-1))


def test_draws_have_the_distribution_and_belong_to_the_request() -> None:
    """20,000 draws at temperature 1 against the softmax: chi-squared at 39 degrees of freedom stays below its 1 - 1e-4 quantile."""
    how = Sampling(temperature=1.0, max_new=20_000, seed=3)
    assert how.uniforms() == how.uniforms() != Sampling(temperature=1.0, max_new=20_000, seed=4).uniforms()
    assert Sampling(temperature=1.0, max_new=5, seed=3).uniforms() == how.uniforms()[:5]  # a longer request begins alike
    chosen, _ = choose(LOGITS[:1].expand(20_000, -1), [how] * 20_000, how.uniforms())
    expected = LOGITS[0].softmax(-1) * 20_000
    seen = torch.bincount(chosen, minlength=40)
    assert float(((seen - expected) ** 2 / expected).sum()) < 85


def test_a_row_that_is_not_a_number_says_so_and_others_do_not() -> None:
    rows = LOGITS.clone()
    rows[1, 3], rows[2, 3], rows[3, 3] = torch.nan, torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        _, values = choose(rows, [Sampling(temperature=temperature)] * 5, [0.5] * 5)
        assert values.isfinite().tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_draw_does_not_depend_on_torchs_default_dtype(dtype: torch.dtype) -> None:
    """Scripts set bfloat16 as the default type to load a model: rounded to it, half of all uniforms near 1 are 1."""
    how, uniforms = [Sampling(temperature=1.0)] * len(LOGITS), [0.9989] * len(LOGITS)
    before = choose(LOGITS, how, uniforms)[0]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(choose(LOGITS, how, uniforms)[0], before)
    finally:
        torch.set_default_dtype(usual)


def test_a_request_does_not_depend_on_torchs_default_device() -> None:
    """Notebooks set the GPU as the default device, whatever the model is on; ``meta`` is a device that every machine has."""
    host = open_host("torch", make_family("Qwen3", torch.float64))
    host.attach("blocks.*", spec=SPECS["lora"], generator=torch.Generator().manual_seed(0))
    engine = Engine(host, generator=torch.Generator().manual_seed(1))
    site, sampling, ones = Site(1, "resid_pre"), Sampling(max_new=4, temperature=1.0), torch.ones(16)
    with torch.device("meta"):
        deployed = Monitor(Site(0, "resid_pre"), [0.0] * 16, -1e6, quarantine="close", prompt=True)  # what the server sends
        steering = Steering(base=(Steer(site, ones, 0.5),), decode=(Steer(site, [1.0] * 16),), monitors=(deployed,))
        request = Request((3, 4, 5), sampling, patch=(Patch(site, 1, "zeros", alpha=0.5),), steering=steering)
        (found,) = engine.generate([request], progress=False)
    (again,) = engine.generate([replace(request, sampling=replace(request.sampling, seed=found.seed))], progress=False)
    assert (found.finish, found.ids) == ("length", again.ids)


WRONG = ({"max_new": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}, {"logprobs": -1})


@pytest.mark.parametrize("given_", [*WRONG, {"stop": ("",)}])
def test_sampling_refuses_what_cannot_be_and_names_it(given_: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(given_))} (must be|is) .*, not \(?-?[\d']"):
        Sampling(**given_)  # pyright: ignore[reportArgumentType]


def test_schedulers_that_could_not_go_on_are_refused() -> None:
    for sizes in ({"rows": 0}, {"budget": 3}, {"chunk": 0}, {"room": 0}, {"grain": 9}):
        with pytest.raises(ValueError, match="not valid: all must be at least 1"):
            Scheduler(**{"rows": 4, "budget": 8, "chunk": 8, **sizes})


def test_an_engine_without_room_is_refused() -> None:
    host = open_host("torch", make_family("MicroGPT"))
    for wrong in (0, -5, True):
        with pytest.raises(ValueError, match=f"^room = {wrong} is not valid: give a whole number of at least 1$"):
            Engine(host, room=wrong)
