"""Answers of /v1/steering/dynamic and /metrics to each key; and all that a disconnect frees."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import ADMIN, ALICE, BOB, KEYS, PROMPT, SITE, Running, bearer, random_micro, running, unhurried, until

from mi_route2.engine.controllers import SetScale
from mi_route2.serve.auth import Keys
from mi_route2.serve.client import PatchStudy

pytestmark = pytest.mark.process

MONITOR = {"site": SITE, "probe": "probe", "name": "watch"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(random_micro(context=512), keys=Keys(KEYS)) as one:
        yield one


def asked(server: Running, key: str, path: str = "/v1/steering/dynamic") -> httpx.Response:
    return server.http.get(path, headers=bearer(key))


def test_rows_monitors_and_requests_are_those_of_the_key_and_an_admin_sees_all(server: Running) -> None:
    with PatchStudy(server.url, ALICE) as alice, PatchStudy(server.url, BOB) as bob, unhurried(server):

        def stream(study: PatchStudy, scale: float) -> Any:
            vector = {"vector": "push", "scale": scale}
            chunks = study.stream(PROMPT, max_tokens=400, ignore_eos=True, steering_vectors={SITE: vector}, monitors=[MONITOR])
            return next(chunks)["mi_route2"]["request"], chunks

        mine, one = stream(bob, 1.0)
        for scale, used in ((1.0, 1), (2.0, 2)):  # the row that both share, and one of her own
            other, chunks = stream(alice, scale)
            told, all_of = asked(server, BOB).json(), asked(server, ADMIN).json()
            assert told["rows"] == {**all_of["rows"], "used": 1}
            assert all_of["rows"]["used"] == used
            assert set(told["requests"]) == {str(mine)}
            assert set(all_of["requests"]) == {str(mine), str(other)}
            assert told["requests"][str(mine)] == {"override": None, "scale": 1.0, "monitors": ["watch"], "running": True}
            assert told["tier"] == {"sites": [], "gain": 1.0}
            assert all_of["queue"].keys() == {"running", "waiting", "sweeps", "steps", "tokens"}
            assert (all_of["queue"]["running"], told["queue"]) == (2, {"running": 1, "waiting": 0})
            assert told["controllers"] == {}
            chunks.close()
            until(lambda: len(server.server.open) == 1)
        one.close()
        until(lambda: not server.server.open)


def test_actions_are_counted_by_source_and_monitors_and_recent_ones_are_the_admins() -> None:
    class Twice:
        name, wants = "twice", ()

        def on_step(self, view: Any) -> list[Any]:
            return [SetScale(2.0, request=view.requests[0].request), SetScale(2.0, request=10**6)] if view.requests else []

    with running(random_micro(context=512), keys=Keys(KEYS)) as small, PatchStudy(small.url, ALICE) as alice:
        small.server.owner._engine.controllers.sync.append(Twice())  # before the engine has a request
        with PatchStudy(small.url, ADMIN) as admin:
            admin.steer(scope="global", monitors=[MONITOR])
        alice.complete(PROMPT, max_tokens=6, ignore_eos=True, steering_vectors={SITE: "push"})
        until(lambda: not small.server.owner.snapshot["running"])
        told, all_of = asked(small, ALICE).json(), asked(small, ADMIN).json()
        counts = all_of["controllers"]["sources"]["twice"]
        assert min(counts["applied"], counts["rejected"]) >= 5
        assert {entry["source"] for entry in all_of["controllers"]["recent"]} == {"twice"}
        assert any("rejected" in entry for entry in all_of["controllers"]["recent"])
        times = all_of["controllers"]["milliseconds"]
        assert 0 <= times["median"] <= times["longest"]
        assert all_of["monitors"]["watch"]["site"] == SITE
        assert (told["monitors"], told["requests"], told["controllers"]) == ({}, {}, {})
        assert told["rows"]["used"] == 0


def test_the_metrics_are_for_the_admin_where_there_are_keys(server: Running) -> None:
    found = asked(server, ALICE, "/metrics")
    assert (found.status_code, found.json()["error"]["code"]) == (401, "admin_only")
    assert "take the admin key" in found.json()["error"]["message"]
    assert "mi_route2_prefix_hits_total" in asked(server, ADMIN, "/metrics").text


def test_what_is_watched_parses_while_requests_come_and_go(server: Running) -> None:
    """Until each of two crowds has come and gone, and twelve times at least."""
    done, rounds = threading.Event(), [0, 0]

    def crowd(number: int) -> None:
        with PatchStudy(server.url, ALICE) as study:
            while not done.is_set():
                given = {"steering_vectors": {SITE: "push"}, "monitors": [MONITOR], "ignore_eos": True}
                study.complete(PROMPT, max_tokens=2, **given)
                chunks = study.stream(PROMPT, max_tokens=50, **given)
                next(chunks)
                chunks.close()
                rounds[number] += 1

    with ThreadPoolExecutor(2) as pool:
        crowds = [pool.submit(crowd, number) for number in range(2)]
        looks = 0
        try:
            while (looks := looks + 1) <= 12 or (min(rounds) == 0 and not any(one.done() for one in crowds)):
                dynamic, metrics = asked(server, ADMIN), asked(server, ADMIN, "/metrics")
                assert [one.text for one in (dynamic, metrics) if one.status_code != 200] == []
                assert dynamic.json()["rows"]["used"] <= 3
                for line in metrics.text.splitlines():
                    assert line.startswith("#") or float(line.rpartition(" ")[2]) >= 0
        finally:
            done.set()
        for one in crowds:
            one.result(20)
    assert min(rounds) > 0


def test_a_sweep_is_freed_after_its_reader_has_gone(server: Running) -> None:
    body = {"clean": [5, 6] * 40, "corrupt": [6, 5] * 40, "answer": 5, "foil": 6, "stream": True}
    owner = server.server.owner
    with server.http.stream("POST", "/v1/patch_sweep", json=body, headers=bearer(ALICE)) as response:
        assert next(response.iter_lines()) == "event: start"
        swept: list[Any] = []
        owner._post(lambda: swept.extend(weakref.ref(job.sweep) for job in owner._jobs))  # on the thread, between two forwards
        until(lambda: swept)
    until(lambda: not server.server.sweeping and not owner._jobs)

    def freed() -> bool:
        gc.collect()
        return all(one() is None for one in swept)

    until(freed)
