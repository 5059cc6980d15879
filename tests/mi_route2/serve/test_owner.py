"""One thread owns the engine: what clients get is what the engine alone gives, and no client disturbs another."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from families import make_family

from mi_route2 import sweep
from mi_route2.engine import Engine, QueueFullError, Request, Result, Sampling
from mi_route2.hosts import open_host
from mi_route2.hosts.base import Host
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
        assert "ct" in "".join(one[0] for one in order)
        np.testing.assert_allclose(job.grid().values, truth.values, rtol=0, atol=1e-10)
        assert (await ended(stream)).ids == alone.ids

    use(both, tokens=24, share=2.0)


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
    async def two(owner: Owner) -> None:
        slow(owner)
        lazy = await owner.submit(Request(PROMPT[:1], Sampling(max_new=40)))
        quick = await owner.submit(Request(PROMPT[:1], Sampling(max_new=40)))
        assert (await ended(quick)).finish == "length"
        assert "let more than 16 events wait" in ((await ended(lazy)).error or "")

    use(two, backlog=16)  # of 40: with fewer, the quick reader too is late on a busy machine


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


def test_the_snapshot_is_plain_data_of_now() -> None:
    async def look(owner: Owner) -> None:
        await ended(await owner.submit(Request(PROMPT, Sampling(max_new=6))))
        async with asyncio.timeout(30):
            while owner.snapshot["tokens"] < 6 or owner.snapshot["running"]:
                await asyncio.sleep(0.01)
        assert owner.snapshot["waiting"] == owner.snapshot["sweeps"] == 0
        assert owner.snapshot["last_error"] is None

    use(look)
