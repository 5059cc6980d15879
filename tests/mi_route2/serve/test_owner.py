"""One thread owns the engine: what clients get is what the engine alone gives, and no client disturbs another."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from families import make_family

from mi_route2 import sweep
from mi_route2.engine import Engine, Event, QueueFullError, Request, Result, Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
from mi_route2.patching.forwards import Resumed
from mi_route2.patching.sweep import prepare, preparing
from mi_route2.serve import owner as owner_module
from mi_route2.serve.owner import Owner, Stream
from mi_route2.sites import Site
from mi_route2.steering.specs import Monitor, Steer, Steering

SITE, PROMPT = Site(1, "resid_pre"), tuple(range(3, 15))
DRAW = torch.Generator().manual_seed(2)
VECTOR = torch.randn(16, generator=DRAW, dtype=torch.float64)
SWEEP: dict[str, Any] = {
    "clean": PROMPT, "corrupt": tuple(range(20, 32)), "answer": 3, "foil": 4, "sites": ["resid_pre", "resid_mid", "resid_post"],
}  # fmt: skip
T = TypeVar("T")


def host_of() -> Host:
    return open_host("torch", make_family("MicroGPT", torch.float64))


def use(function: Callable[[Owner], Awaitable[T]], engine: Engine | None = None, **given: Any) -> T:
    """Run ``function`` with an owner that is closed afterwards."""

    async def main() -> T:
        owner = Owner(engine or Engine(host_of()), **given)
        owner.start()
        try:
            return await asyncio.wait_for(function(owner), 120)
        finally:
            await owner.close(drain=0.0)

    return asyncio.run(main())


async def ended(stream: Stream) -> Result:
    """Read a stream to its end."""
    async for _ in stream:
        pass
    assert stream.result is not None
    return stream.result


def slow(owner: Owner) -> None:
    """Let each step of the engine take long enough that a client finds its stream running."""
    step = owner._engine.step
    owner._engine.step = lambda: time.sleep(0.05) or step()


def requests() -> list[Request]:
    monitor = Monitor(SITE, VECTOR, gates=(), name="probe")
    return [
        Request(PROMPT[: 3 + i % 7], Sampling(max_new=3 + i % 9, temperature=i % 2 * 0.7, seed=i), readings=i % 3 == 0,
                steering=Steering(decode=(Steer(SITE, VECTOR, 0.1 * i),), monitors=(monitor,)))
        for i in range(12)
    ]  # fmt: skip


def test_streams_of_many_clients_are_the_results_of_the_engine_alone() -> None:
    truth = Engine(host_of(), exact=True).generate(requests())

    async def read(owner: Owner, request: Request) -> tuple[list[int], dict[int, Any], Any]:
        ids, readings = [], {}
        async with await owner.submit(request) as stream:
            async for event in stream:
                ids += [event.token.token] if event.token else []
                readings |= event.readings
        return ids, readings, stream.result

    async def all_of(owner: Owner) -> list[Any]:
        return await asyncio.gather(*(read(owner, request) for request in requests()))

    for (ids, readings, result), expected in zip(use(all_of, Engine(host_of(), exact=True)), truth, strict=True):
        assert ids == result.ids == expected.ids
        assert readings == result.readings == expected.readings
        assert result.finish == "length"


def test_a_sweep_beside_streams_is_the_sweep_alone_and_streams_go_on_between_its_forwards() -> None:
    truth = sweep(host_of(), progress=False, **SWEEP)
    (alone,) = Engine(host_of()).generate([Request(PROMPT, Sampling(max_new=40))])

    async def both(owner: Owner) -> None:
        stream, job = await asyncio.gather(owner.submit(Request(PROMPT, Sampling(max_new=40))), owner.sweep(**SWEEP))
        order: list[str] = []

        async def tokens() -> None:
            async for _ in stream:
                order.append("token")

        async def cells() -> int:
            seen = 0
            async for finished in job:
                order.append("cells")
                seen += len(finished.cells)
            return seen

        _, seen = await asyncio.gather(tokens(), cells())
        assert seen == job.sweep.total == truth.values.size
        assert order.count("cells") > 5
        assert "".join(one[0] for one in order).count("ct") >= 3
        np.testing.assert_allclose(job.grid().values, truth.values, rtol=0, atol=1e-10)
        assert (await ended(stream)).ids == alone.ids

    use(both, tokens=24, share=2.0)


def test_a_sweep_takes_its_share_of_the_time_of_streams_and_all_of_an_idle_engine() -> None:
    async def both(owner: Owner) -> None:
        stream, job = await asyncio.gather(owner.submit(Request(PROMPT[:1], Sampling(max_new=60))), owner.sweep(**SWEEP))
        forward, beside = job._forward, []

        def slow() -> bool:
            beside.append(owner._engine.busy)
            time.sleep(0.01)
            return forward()

        job._forward = slow  # pyright: ignore[reportAttributeAccessIssue]
        await ended(stream)
        steps = owner._step_seconds
        async for _ in job:
            pass
        assert job.grid().values.size == job.sweep.total
        assert 1 <= sum(beside) <= 2 + 2.0 * steps / 0.01
        assert len(beside) > sum(beside)

    use(both, tokens=12, share=2.0)


def test_the_forwards_of_a_limited_sweep_are_small_and_the_grid_is_the_same() -> None:
    host = host_of()
    small, large = prepare(host, **SWEEP, tokens=24), prepare(host, **SWEEP)
    assert len(small.groups) > len(large.groups)
    for group in small.groups:
        assert len(group.cells) * (12 - group.start) <= 24
    np.testing.assert_allclose(small.grid(False).values, large.grid(False).values, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="0 tokens"):
        prepare(host, **SWEEP, tokens=0)


def test_tokens_come_between_the_runs_of_a_sweeps_two_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(owner: Owner) -> None:
        counts: list[int] = []
        run = Resumed._record

        def counted(self: Resumed, *given: Any) -> Any:
            counts.append(owner._engine.tokens)
            return run(self, *given)

        monkeypatch.setattr(Resumed, "_record", counted)
        stream = await owner.submit(Request(PROMPT[:1], Sampling(max_new=60)))
        job = await owner.sweep(**SWEEP)
        await ended(stream)
        async for _ in job:
            pass
        first, second = counts
        assert second > first

    use(both, share=2.0)


def test_errors_of_a_request_and_of_a_call_come_to_who_asked_and_leave_the_rest_alone() -> None:
    async def wrong(owner: Owner) -> None:
        good = await owner.submit(Request(PROMPT, Sampling(max_new=5)))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await owner.submit(Request((10**6,)))
        with pytest.raises(KeyError, match="outside the model"):
            await owner.sweep(**SWEEP | {"sites": [Site(99, "resid_pre")]})
        with pytest.raises(ZeroDivisionError):
            await owner.call(lambda engine: 1 // 0)
        assert await owner.call(lambda engine: engine.host.model.training) is False
        assert (await ended(good)).finish == "length"
        assert owner.alive

    use(wrong)


def test_leaving_a_stream_cancels_its_request_and_a_full_queue_says_so() -> None:
    async def leave(owner: Owner) -> None:
        endless = Request(PROMPT[:1], Sampling(max_new=45))
        slow(owner)
        async with await owner.submit(endless) as stream:
            async for _ in stream:
                break
            for _ in range(2):
                await owner.submit(endless)
            with pytest.raises(QueueFullError):
                await owner.submit(endless)
        assert (await ended(stream)).finish == "cancelled"

    use(leave, Engine(host_of(), rows=1, queue=2))


def test_a_reader_that_is_too_slow_is_cancelled_and_holds_up_nobody() -> None:
    async def slow(owner: Owner) -> None:
        lazy = await owner.submit(Request(PROMPT[:1], Sampling(max_new=40)))
        quick = await owner.submit(Request(PROMPT[:1], Sampling(max_new=40)))
        assert (await ended(quick)).finish == "length"
        assert "let more than 16 events wait" in ((await ended(lazy)).error or "")

    use(slow, backlog=16)  # of 40: with fewer, the quick reader too is late on a busy machine


def test_a_reader_that_waits_for_every_event_is_not_too_slow_however_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries are further apart with every stream, so that a small backlog is less than one of them."""
    monkeypatch.setattr(owner_module, "PACE", 0.05)

    async def read(owner: Owner) -> None:
        async def one() -> None:
            stream = await owner.submit(Request(PROMPT[:1], Sampling(max_new=40)))
            ids = [event.token.token async for event in stream if event.token]
            result = await ended(stream)
            assert (result.finish, result.ids) == ("length", ids), result.error

        await asyncio.gather(one(), one())
        assert owner.slow == 0

    use(read, backlog=1)


def test_commands_that_never_end_keep_no_stream_from_its_tokens() -> None:
    """Clients that ask again as soon as they are answered: the next command always waits when one is done."""

    async def ask(owner: Owner) -> None:
        stream = await owner.submit(Request(PROMPT[:1], Sampling(max_new=8)))

        async def busy() -> None:
            while stream.result is None:
                await owner.call(lambda engine: time.sleep(0.004))

        clients = [asyncio.create_task(busy()) for _ in range(4)]
        try:
            async with asyncio.timeout(20):
                assert len([event async for event in stream]) == 8
        finally:
            for one in clients:
                one.cancel()

    use(ask)


def test_a_generate_on_the_thread_takes_no_token_from_streams() -> None:
    async def both(owner: Owner) -> None:
        stream = await owner.submit(Request(PROMPT, Sampling(max_new=20)))
        (other,) = await owner.call(lambda engine: engine.generate([Request(PROMPT[:2], Sampling(max_new=3))]))
        ids = [event.token.token async for event in stream if event.token]
        assert (ids, len(other.ids)) == ((await ended(stream)).ids, 3)

    use(both)


def test_a_request_may_be_cancelled_twice_before_its_end_is_noticed() -> None:
    """By its reader's slowness and by the client that goes away, for example."""

    async def cancel(owner: Owner) -> None:
        stream = await owner.submit(Request(PROMPT[:1], Sampling(max_new=45)))
        await owner.call(lambda engine: (stream.cancel(), stream.cancel()))  # both come before the next step
        assert (await ended(stream)).finish == "cancelled"
        assert owner.alive

    use(cancel)


def test_tokens_of_many_streams_come_together_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a stream and its end wait for nobody, even if the pace of deliveries is slower than all of it."""
    for name in ("PACE", "LONGEST_PACE"):
        monkeypatch.setattr(owner_module, name, 60.0)
    put, deliveries = Stream._put, defaultdict[int, list[int]](list)

    def counted(stream: Stream, items: list[Event], ended: bool) -> None:
        deliveries[stream.number].append(sum(one.token is not None for one in items))
        put(stream, items, ended)

    monkeypatch.setattr(Stream, "_put", counted)

    async def read(owner: Owner) -> None:
        async def one(number: int) -> None:
            stream, sizes = await owner.submit(Request(PROMPT[:1], Sampling(max_new=20 + number))), []
            while events := await stream.batch():
                sizes.append(len(events))
            assert sum(sizes) == 20 + number
            assert len(sizes) <= 3

        async def long() -> None:  # what comes first is the prompt's norms, piece by piece
            await ended(await owner.submit(Request(PROMPT, Sampling(max_new=30), norms=(SITE,))))

        await asyncio.wait_for(asyncio.gather(*map(one, range(16)), long()), 30)
        assert len(deliveries) == 17
        assert all(next(filter(None, sizes)) == 1 for sizes in deliveries.values())
        assert not owner._undelivered

    use(read, Engine(host_of(), chunk=4, block=4))


def test_cancelled_sweeps_end_with_the_reason_and_free_the_thread() -> None:
    async def cancel(owner: Owner) -> None:
        job = await owner.sweep(**SWEEP)
        async with job:
            async for _ in job:
                break
        async for _ in job:
            pass
        assert job.error == "this sweep was cancelled"
        with pytest.raises(RuntimeError, match="cancelled"):
            job.grid()
        again = await owner.sweep(**SWEEP)
        async for _ in again:
            pass
        assert again.grid().values.shape == (6, 12)

    use(cancel, tokens=24)


def test_a_sweep_whose_caller_leaves_while_it_is_prepared_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **given: Any) -> Any:
        began.set()
        go_on.wait(60)
        return preparing(*args, **given)

    monkeypatch.setattr(owner_module, "preparing", slow)

    async def leave(owner: Owner) -> None:
        asking = asyncio.create_task(owner.sweep(**SWEEP))
        await asyncio.to_thread(began.wait, 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        jobs = await owner.call(lambda _: list(owner._jobs)) if go_on.set() is None else []
        while owner._jobs:
            await asyncio.sleep(0.01)
        assert [job.error for job in jobs] == ["this sweep was cancelled"]

    use(leave, tokens=24)


def test_a_thread_that_dies_ends_every_stream_with_its_reason_and_refuses_more() -> None:
    async def die(owner: Owner) -> None:
        slow(owner)
        stream = await owner.submit(Request(PROMPT[:1], Sampling(max_new=45)))
        job = await owner.sweep(**SWEEP)

        def change(engine: Engine) -> None:
            with torch.no_grad():
                next(engine.host.model.parameters()).add_(1.0)

        await owner.call(change)
        assert "changed while 1 requests ran" in ((await ended(stream)).error or "")
        async for _ in job:
            pass
        assert job.error
        while owner.alive:
            await asyncio.sleep(0.01)
        for ask in (lambda: owner.submit(Request(PROMPT)), lambda: owner.sweep(**SWEEP), lambda: owner.call(lambda engine: 1)):
            with pytest.raises(RuntimeError, match="thread failed with RuntimeError"):
                await ask()

    use(die)


def test_closing_drains_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        owner = Owner(Engine(host_of()))
        owner.start()
        stream = await owner.submit(Request(PROMPT, Sampling(max_new=30)))
        closing = asyncio.create_task(owner.close(drain=60.0))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="shutting down"):
            await owner.submit(Request(PROMPT))
        assert (await ended(stream)).finish == "length"
        await closing
        assert not owner.alive
        with pytest.raises(RuntimeError, match="thread has ended"):
            await owner.call(lambda engine: 1)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_what_comes_while_the_thread_ends_is_refused_and_never_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread still lives, but has looked for commands for the last time."""

    async def main() -> None:
        owner, buried, release = Owner(Engine(host_of())), threading.Event(), threading.Event()
        usual = owner._bury

        def bury() -> None:
            usual()
            buried.set()
            release.wait(60)

        monkeypatch.setattr(owner, "_bury", bury)
        owner.start()
        closing = asyncio.create_task(owner.close(drain=0.0))
        await asyncio.to_thread(buried.wait, 60)
        try:
            with pytest.raises(RuntimeError, match="the engine's thread has ended"):
                await asyncio.wait_for(owner.call(lambda engine: engine.steps), 3)
        finally:
            release.set()
            await closing

    asyncio.run(main())


def test_the_snapshot_is_plain_data_of_now() -> None:
    async def look(owner: Owner) -> None:
        await ended(await owner.submit(Request(PROMPT, Sampling(max_new=6))))
        async with asyncio.timeout(30):
            while owner.snapshot["tokens"] < 6 or owner.snapshot["running"]:
                await asyncio.sleep(0.01)
        assert owner.snapshot["waiting"] == owner.snapshot["sweeps"] == 0
        assert owner.snapshot["last_error"] is None

    use(look)
