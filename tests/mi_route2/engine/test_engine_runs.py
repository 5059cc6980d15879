"""Captured runs are whole, and say what acted behind their last value; a sweep sees that a command wrote the weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import finish, tiny

from mi_route2 import Steer, sweep
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.patching import CleanRun
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection
from mi_route2.serve.owner import Owner
from mi_route2.sites import Site
from mi_route2.steering.specs import Steering

PROMPT, OTHER = tuple(range(3, 15)), tuple(range(20, 32))
PART = TokenSelection("prompt")


def captured(store: RunStore, *sites: Site) -> tuple[Engine, Callable[[], int]]:
    """An engine that computes a prompt in three pieces, and a function that submits the request that captures it as ``clean``."""
    engine = Engine(tiny("Llama"), store=store, chunk=4, budget=8, rows=2)
    request = Request(PROMPT, Sampling(max_new=4), capture=tuple(Capture(site, PART) for site in sites), run="clean")
    return engine, lambda: engine.submit(request)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_says_that_steering_came_after_it_was_admitted(late: bool) -> None:
    store, sites = RunStore(), (Site(1, "resid_post"), Site(0, "resid_pre"))
    engine, submit = captured(store, *sites)
    vector = torch.ones(16, dtype=torch.float64)
    if not late:
        engine.steering.set_global("base", [Steer(sites[0], vector, 3.0)])
    submit()
    engine.step()
    if late:
        engine.steering.set_global("base", [Steer(sites[0], vector, 3.0)])
    finish(engine)
    with pytest.raises(ValueError, match="was steered or patched at resid_post of the last block or behind it"):
        CleanRun.stored(engine.host, store, "clean", "blocks.0.resid_pre")


@pytest.mark.parametrize("whose", ["another request's", "its own generated tokens'"])
def test_a_run_does_not_say_what_steering_did_elsewhere(whose: str) -> None:
    host, store, final = tiny("Llama"), RunStore(), Site(1, "resid_post")
    early, late = (Steer(site, torch.ones(16, dtype=torch.float64), 3.0) for site in (Site(0, "resid_mid"), final))
    engine, captures = Engine(host, store=store), (Capture(Site(0, "resid_pre"), PART), Capture(final, PART))
    own = Steering(prefill=(early,), decode=(late,) if whose.startswith("its") else ())
    engine.submit(Request(OTHER, Sampling(max_new=4), steering=Steering(base=(late,))))
    engine.submit(Request(PROMPT, Sampling(max_new=4), steering=own, capture=captures, run="clean"))
    finish(engine)
    assert CleanRun.stored(host, store, "clean", "blocks.0.resid_pre").length == len(PROMPT)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_cancelled_request_leaves_no_half_run(how: str, tmp_path: Path) -> None:
    store = RunStore(folder=tmp_path)
    engine, submit = captured(store, Site(1, "resid_post"))
    number = submit()
    engine.step()
    {"cancel": lambda: engine.cancel(number), "close": engine.close}[how]()
    finish(engine)
    assert store.runs() == []
    if how != "close":
        submit()  # the name is free
        finish(engine)
        assert store.runs() == ["clean"]
        assert store.positions("clean", Site(1, "resid_post")) == list(range(12))


@pytest.mark.parametrize("written", [False, True])
def test_a_sweep_sees_what_a_command_wrote_between_its_forwards(written: bool) -> None:
    host = tiny()
    asked = {"clean": PROMPT, "corrupt": OTHER, "answer": 3, "foil": 4, "sites": ["resid_pre", "resid_mid", "resid_post"]}
    truth = sweep(host, progress=False, **asked)

    def change(_engine: Engine) -> None:
        for p in host.model.parameters() if written else ():
            p.detach().mul_(1.5)

    async def swept() -> object:
        owner = Owner(Engine(host), tokens=24)
        owner.start()
        job, forwards = await owner.sweep(**asked), 0
        async for _ in job:
            forwards += 1
            if forwards == 2:
                await owner.call(change)
        assert forwards > 2 or written
        try:
            return job.grid()
        except RuntimeError as error:
            return str(error)
        finally:
            await owner.close(drain=0.0)

    grid = asyncio.run(swept())
    if written:
        assert "changed since this sweep was prepared" in str(grid)
    else:
        assert abs(grid.values - truth.values).max() < 1e-10  # pyright: ignore[reportAttributeAccessIssue]
