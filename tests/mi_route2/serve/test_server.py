"""The server beside completions: keys and what belongs to each, limits, sweeps, runs, studies, the client, the command."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest
import torch
from served import (
    ADMIN,
    ALICE,
    BOB,
    KEYS,
    OTHER,
    PROMPT,
    SITE,
    Running,
    bearer,
    metrics,
    random_micro,
    refusal,
    running,
    unhurried,
    until,
)  # fmt: skip
from starlette.requests import ClientDisconnect

from mi_route2 import sweep
from mi_route2.engine import Capture, Engine, Request, Sampling
from mi_route2.patching.patches import Patch
from mi_route2.runs import RunStore
from mi_route2.runs.record import TokenSelection
from mi_route2.serve.api import study as study_routes
from mi_route2.serve.auth import ApiError, Events, Keys
from mi_route2.serve.client import AsyncPatchStudy, PatchStudy, ServerError
from mi_route2.serve.models import load
from mi_route2.serve.options import Limits
from mi_route2.sites import Site
from mi_route2.steering.state import SteeringState
from studies.environments.micro.served import MicroTokenizer

pytestmark = pytest.mark.process

MODEL = "tests.support.served:random_micro"
PATCH = {"site": SITE, "position": 3, "source": {"run": "mine", "position": 3}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("study")
    study(folder)
    limits = Limits(per_key=8, sweeps=1, cells=200, max_body=100_000)
    with running(random_micro(context=512), keys=Keys(KEYS), limits=limits, study_runs=folder) as one:
        yield one


def study(folder: Path) -> None:
    """Write what a study writes: one run that has ended, and one that is being written."""
    (folder / "settings.json").write_text(json.dumps({"steps": 3}))
    for arm, status in (("vanilla", "finished"), ("route2", "running")):
        run = folder / "seed-0" / arm
        run.mkdir(parents=True)
        rows = [{"step": i, "hack": 0.25 * i, "kl": None} for i in range(3)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: 3 if arm == "vanilla" else 2]) + '{"st')
        about = {"name": arm, "role": "baseline"}
        (run / "manifest.json").write_text(json.dumps({"arm": arm, "seed": 0, "status": status, "arm_spec": about}))
    rates = {"run_tests": {"on": {"hack": 0.5}, "deploy": {"hack": 0.25}}}
    (folder / "seed-0" / "vanilla" / "eval.json").write_text(json.dumps({"arm": "vanilla", "seed": 0, "modes": rates}))


# Keys


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {ALICE}", f"Bearer {ALICE}x", ALICE, "Bearer \xe9\xe9\xe9"])
def test_nobody_gets_in_without_a_key(server: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/runs"), ("GET", "/metrics")):
        body = {"prompt": PROMPT} if method == "POST" else None
        response = server.http.request(method, path, headers=headers, json=body)
        assert response.status_code == 401, path
        assert "Authorization: Bearer KEY" in response.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/study").json()["key_needed"] is True


def test_vectors_configurations_runs_and_conversations_belong_to_a_key(server: Running, alice: PatchStudy, bob: PatchStudy) -> None:
    vector = torch.ones(16)
    alice.steer(vectors={"mine": vector}, name="held", decode_steering_vectors={SITE: "mine"})
    alice.complete(PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=2)
    found = refusal(alice.steer, vectors={"zeros": vector})
    assert (found.status, "stands for zeros in a patch" in str(found)) == (400, True)
    try:
        assert alice.runs() == ["mine"]
        assert bob.runs() == []
        for asked in ({"steering_vectors": {SITE: "mine"}}, {"hold": "held"}, {"patch": [PATCH]}):
            alice.complete(PROMPT, max_tokens=2, **asked)
            found = refusal(bob.complete, PROMPT, max_tokens=2, **asked)
            assert found.status == 404
            assert "alice" not in str(found)
            assert not re.search(r"[0-9a-f]{16}", str(found)), found
        for function, given in ((bob.drop, ("mine",)), (bob.values, ("mine", SITE))):
            assert refusal(function, *given).status == 404
        # the same names of another key are other things
        bob.steer(vectors={"mine": -vector}, name="held", decode_steering_vectors={SITE: "mine"})
        bob.complete(PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=2)
        one, other = (
            study.complete(PROMPT, hold="held", max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)["choices"][0]
            for study in (alice, bob)
        )
        assert one["logprobs"]["token_logprobs"] != other["logprobs"]["token_logprobs"]
        bob.unsteer()
        bob.drop("mine")
        assert alice.runs() == ["mine"]
        assert alice.steer()["held"].keys() == {"held"}
    finally:
        alice.drop("mine")
    always = {
        "when": "always",
        "scope": "rest_of_conversation",
        "apply": {"add": [{"site": SITE, "vector": "push", "scale": 40.0}]},
    }

    def logprobs(client: PatchStudy, **given: Any) -> list[float]:
        asked = {"conversation_id": "talk", "max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        return client.complete(PROMPT, **asked, **given)["choices"][0]["logprobs"]["token_logprobs"]

    plain = logprobs(bob)
    steered = logprobs(alice, steering=[always])
    torch.testing.assert_close(logprobs(alice), steered, rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs(bob), plain, rtol=0, atol=1e-5)
    assert max(abs(a - b) for a, b in zip(plain, steered, strict=True)) > 1e-3


def test_names_that_go_or_come_at_the_same_time_are_neither_lost_nor_told_to_others(
    server: Running, alice: PatchStudy, bob: PatchStudy
) -> None:
    bob.steer(vectors={"secret": torch.ones(16)})
    alice.steer(vectors={"mine": torch.ones(16)})
    owner = next(one for one in server.server._names.values() if "mine" in one.vectors)
    # as if another request of the key had cleared it between its look-up and its submission
    asyncio.run(server.server.owner.call(lambda engine: engine.steering.unregister(owner.inside("mine"))))
    for given in ({"steering_vectors": {SITE: "mine"}}, {"patch": [{"site": SITE, "position": 1, "source": "mine"}]}):
        found = refusal(alice.complete, PROMPT, **given)
        assert (found.status, found.code) == (404, "unknown_name"), str(found)
        assert "secret" not in str(found)
        assert not re.search(r"[0-9a-f]{16}", str(found)), found

    async def together() -> None:
        async with AsyncPatchStudy(server.url, ALICE) as study:
            await asyncio.gather(*(study.steer(vectors={f"v{i}": [float(i)] * 16}) for i in range(8)))

    asyncio.run(together())
    assert {f"v{i}" for i in range(8)} <= alice.steer()["vectors"].keys()


def test_the_prefix_cache_is_shared_within_a_key_only(alice: PatchStudy, bob: PatchStudy) -> None:
    prompt = random_micro().encode(PROMPT) * 5

    def cached(study: PatchStudy) -> int:
        return study.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(alice), cached(bob)] == [0, 0]
    assert cached(alice) == cached(bob) > 0


def test_a_stream_is_touched_by_its_own_key_only(server: Running, alice: PatchStudy, bob: PatchStudy) -> None:
    with unhurried(server):
        chunks = alice.stream(PROMPT, max_tokens=400, decode_steering_vectors={SITE: "push"}, ignore_eos=True)
        number = next(chunks)["mi_route2"]["request"]
        assert refusal(bob.scale, number, 2.0).status == 404
        assert str(number) not in bob._call("GET", "/v1/steering/dynamic")["requests"]
        assert str(number) in alice._call("GET", "/v1/steering/dynamic")["requests"]
        alice.scale(number, 2.0)
        chunks.close()


def test_what_concerns_all_takes_the_admin_key(server: Running, alice: PatchStudy, admin: PatchStudy) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    given: dict[str, Any] = {"scope": "global", "steering_vectors": {SITE: {"vector": "push", "scale": 5.0}}}
    before = alice.complete(PROMPT, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    own = alice.complete(PROMPT, **asked, steering_vectors=given["steering_vectors"])["choices"][0]["logprobs"]["token_logprobs"]
    found = refusal(alice.steer, **given)
    assert (found.status, found.code) == (401, "admin_only")
    assert admin.steer(**given)["global"] == {"base": [SITE]}
    after = alice.complete(PROMPT, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    assert refusal(alice.unsteer, scope="global").status == 401
    admin.unsteer(scope="global")
    again = alice.complete(PROMPT, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    torch.testing.assert_close(after, own, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, before, rtol=0, atol=1e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3


def test_what_is_refused_leaves_nothing_behind(alice: PatchStudy) -> None:
    for given in (
        {"vectors": {"a": [1.0] * 16, "b": [1.0, 2.0]}, "name": "x", "steering_vectors": {SITE: "b"}},
        {"vectors": {"a": [1.0] * 16}, "name": "x", "steering_vectors": {SITE: "missing"}},
        {"vectors": {"a": [1.0] * 16}, "steering_vectors": {SITE: "a"}},
    ):
        refusal(alice.steer, **given)
        found = alice.steer()
        assert (found["vectors"], found["held"]) == ({}, {})
    assert refusal(alice.unsteer, name="x").status == 404


def test_what_is_refused_for_all_leaves_nothing_behind(server: Running, admin: PatchStudy) -> None:
    good, monitor = {SITE: [1.0] * 16}, {"site": SITE, "probe": "push", "name": "watch", "gates": []}
    state = server.server.owner._engine.steering
    for wrong in (
        {"steering_vectors": good, "decode_steering_vectors": {SITE: [1.0] * 5}},
        {"steering_vectors": good, "monitors": [monitor, {**monitor, "name": "other", "probe": [1.0] * 5}]},
        {"steering_vectors": good, "monitors": [{**monitor, "quarantine": "close", "prompt": True}]},
        {"steering_vectors": good, "monitors": [monitor, monitor]},
    ):
        assert refusal(admin.steer, scope="global", **wrong).status == 400
        assert admin._call("GET", "/v1/steering")["global"] == {}
        assert (state.snapshot()["globals"], state.monitors) == ({"base": [], "prefill": [], "decode": []}, ())


def test_keys_are_checked_and_do_not_show() -> None:
    for keys in ([("short", False)], [(ALICE, False), (ALICE, True)], [("with a space in the key", False)]):
        with pytest.raises(ValueError, match="key"):
            Keys(keys)
    one, other = Keys(KEYS), Keys(KEYS)
    client = one.client(f"Bearer {ALICE}")
    assert ALICE not in repr(client)
    assert client.owner == other.client(f"Bearer {ALICE}").owner
    assert client.salt != other.client(f"Bearer {ALICE}").salt
    assert len({one.client(f"Bearer {key}").salt for key, _ in KEYS}) == 3


def test_a_key_in_a_file_is_the_whole_key(tmp_path: Path) -> None:
    """One with a # too, which the environment may have; behind a space it begins a comment."""
    (tmp_path / "keys").write_text(f"# of the group\nadmin {ALICE}#1  # hers\n{ALICE}#2\t#\n\n  #{ADMIN}\n")
    keys = Keys.read(tmp_path / "keys")
    assert [keys.client(f"Bearer {ALICE}#{i}").admin for i in (1, 2)] == [True, False]
    assert len(keys) == 2
    with pytest.raises(ValueError, match="is a folder: give a file of keys"):
        Keys.read(tmp_path)
    for other in (ALICE, ADMIN):
        with pytest.raises(ApiError, match="needs a key"):
            keys.client(f"Bearer {other}")


# Limits


def test_limits_answer_with_a_sentence(server: Running, alice: PatchStudy) -> None:
    large = refusal(alice.complete, [1] * 60_000)
    assert (large.status, large.code) == (413, "too_large")
    assert "--max-body" in str(large)
    for n, status in ((8, 200), (9, 400)):  # however long one waits, a key never has so many
        response = server.http.post("/v1/completions", json={"prompt": PROMPT, "n": n, "max_tokens": 1}, headers=bearer(ALICE))
        assert response.status_code == status
    assert "Retry-After" not in response.headers
    assert "ask for fewer" in response.json()["error"]["message"]
    with unhurried(server):
        stream = alice.stream(PROMPT, max_tokens=200, ignore_eos=True)
        next(stream)
        response = server.http.post("/v1/completions", json={"prompt": PROMPT, "n": 8, "max_tokens": 1}, headers=bearer(ALICE))
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert "wait for some to end" in response.json()["error"]["message"]
        stream.close()
    many = refusal(alice.sweep, [5] * 400, [6] * 400, answer=5, foil=6)
    assert (many.status, "800 cells" in str(many)) == (413, True)


def test_a_full_queue_answers_429() -> None:
    with (
        running(random_micro(context=512), limits=Limits(rows=1, queue=1)) as small,
        PatchStudy(small.url) as study,
        unhurried(small),
    ):
        streams = []
        for _ in range(2):
            streams.append(study.stream(PROMPT, max_tokens=480, ignore_eos=True))
            if len(streams) == 1:
                next(streams[0])
        body = {"prompt": PROMPT, "n": 2, "max_tokens": 1}
        found = small.http.post("/v1/completions", json=body)
        assert (found.status_code, found.json()["error"]["code"], found.headers["Retry-After"]) == (429, "queue_full", "1")
        streams[0].close()


def test_a_sweep_has_a_deadline_too() -> None:
    with running(random_micro(context=512), limits=Limits(deadline=1e-4)) as small, PatchStudy(small.url) as study:
        with pytest.raises(
            ServerError,
            match=r"the deadline of 0\.0001 s has passed, (before both prompts were run|after 0 of \d+ cells): name fewer",
        ):
            study.sweep(PROMPT, OTHER, answer=" +", foil=" *", sites=["resid_pre"])


def test_one_keys_many_runs_evict_no_run_within_anothers_share() -> None:
    """Of the other's own the newest stay, within the bytes of the store."""
    given: dict[str, Any] = {"capture": [SITE], "max_tokens": 1}
    with running(random_micro(context=512), keys=Keys(KEYS), limits=Limits(store=20_000)) as small:
        with PatchStudy(small.url, ALICE) as alice, PatchStudy(small.url, BOB) as bob:
            alice.complete(PROMPT, run="mine", **given)
            for i in range(40):
                bob.complete(PROMPT, run=f"r{i:02d}", **given)
            kept = bob.runs()
            assert alice.runs() == ["mine"]
            assert kept == [f"r{i:02d}" for i in range(40 - len(kept), 40)]
            assert 15_000 < small.server.store.stats().memory_bytes <= 20_000
            gone = refusal(bob.values, "r00", SITE)
    assert gone.status == 404
    assert re.search("run 'r00' of .* was evicted", str(gone))


def test_a_request_that_memory_cannot_hold_is_refused_by_bytes_before_it_runs() -> None:
    with running(random_micro(context=512), limits=Limits(slot_bytes=100_000)) as small, PatchStudy(small.url) as study:
        assert study.complete(PROMPT, max_tokens=8)["choices"]
        many = refusal(study.complete, PROMPT, max_tokens=480)
    assert many.status == 400
    assert re.search(r"tokens need [\d,]+ bytes of keys and values, but the engine may hold 100,000: ask for fewer", str(many))


def test_captures_that_would_make_a_large_answer_are_refused_before_they_run() -> None:
    with running(random_micro(context=512), limits=Limits(capture_bytes=16 * 4 * 40)) as small, PatchStudy(small.url) as study:
        length = len(random_micro().encode(PROMPT))
        assert study.complete(PROMPT, max_tokens=41 - length, capture=[SITE])["choices"]
        for given in ({"max_tokens": 42 - length}, {"max_tokens": 41 - length, "n": 2}):
            large = refusal(study.complete, PROMPT, **given, capture=[{"site": SITE, "part": "all"}])
            assert (large.status, large.code) == (413, "too_large")
            assert "bytes, of 2,560 that an answer may have" in str(large)
        assert study.complete(PROMPT, max_tokens=100, capture=[SITE], run="r")["choices"]
        assert refusal(study.complete, PROMPT, capture=["blocks.9.resid_pre"]).status == 400


def test_only_the_engines_thread_hooks_the_model_and_reads_its_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    served, hooking, reading = random_micro(context=512), list[str](), list[str]()
    monkeypatch.setattr(
        SteeringState,
        "snapshot",
        lambda state, read=SteeringState.snapshot: reading.append(current_thread().name) or read(state),
    )
    hooks = type(served.host).hooks
    with running(served) as server, PatchStudy(server.url) as study:
        monkeypatch.setattr(type(served.host), "hooks", lambda *given: hooking.append(current_thread().name) or hooks(*given))
        study.complete(PROMPT, capture=["blocks.1.z"], max_tokens=2)  # whose size takes a forward
        study.complete(PROMPT, capture=["blocks.0.q"], run="r", max_tokens=2)
        study.complete(
            PROMPT, patch=[{"site": "blocks.0.mlp_out", "position": 1, "source": "zeros"}], norms=["blocks.0.v"], max_tokens=2
        )
        study.cell(PROMPT, OTHER, "blocks.1.z[1]", 2, max_tokens=2)
        study.steer(vectors={"v": [0.0] * server.server.width}, name="held", steering_vectors={"blocks.1.attn_out": "v"})
        study.sweep(clean=PROMPT, corrupt=OTHER, answer=5, foil=6, sites=["attn_out"])
        assert server.http.get("/v1/steering/dynamic").status_code == 200
    assert len(hooking) > 6
    assert set(hooking) == set(reading) == {"engine"}


def test_no_key_fills_the_queue() -> None:
    with running(random_micro(context=512), keys=Keys(KEYS), limits=Limits(rows=1, queue=5)) as small, unhurried(small):
        with PatchStudy(small.url, ALICE) as alice, PatchStudy(small.url, BOB) as bob:
            stream = alice.stream(PROMPT, max_tokens=480, ignore_eos=True)
            next(stream)
            assert "of 2 that a key may have" in str(refusal(alice.complete, PROMPT, n=2))
            stream.close()
            assert bob.complete(PROMPT, n=2, max_tokens=2)["choices"]


def test_without_a_number_an_eighth_of_the_free_memory_is_for_keys_and_values() -> None:
    with running(random_micro()) as small:
        given = small.server.owner._engine._residents.slot_bytes
    assert given is not None
    assert 256 << 20 <= given <= 8 << 30


def test_an_error_names_some_of_many_runs(server: Running, alice: PatchStudy) -> None:
    prefix = server.server.names(Keys(KEYS).client(f"Bearer {ALICE}")).prefix
    for i in range(30):
        with server.server.store.writing(f"{prefix}r{i:02d}", weights="w"):
            pass
    try:
        for function in (partial(alice.values, "x", SITE), partial(alice.drop, "x")):
            told = str(refusal(function))
            assert told.startswith("you have no run 'x'; there are: r00, r01, ")
            assert told.endswith(", r19 and 10 more")
        assert len(alice.runs()) == 30
    finally:
        for run in alice.runs():
            alice.drop(run)


def test_a_run_larger_than_the_store_is_an_error_with_the_sizes() -> None:
    with running(random_micro(context=512), limits=Limits(store=20_000)) as small:
        given = {"prompt": PROMPT, "capture": [{"site": SITE, "part": "all"}], "ignore_eos": True}
        assert small.http.post("/v1/completions", json={**given, "max_tokens": 2, "run": "short"}).status_code == 200
        answer = small.http.post("/v1/completions", json={**given, "max_tokens": 450, "run": "long"})
        assert answer.status_code == 422
        assert re.search(r"run 'long' needs [\d,]+ bytes or more, and the store holds 20,000", answer.json()["error"]["message"])
        assert small.http.get("/v1/runs/long").status_code == 404
        assert small.http.post("/v1/completions", json={**given, "max_tokens": 2, "run": "again"}).status_code == 200


def test_metrics_count_what_runs_what_was_generated_and_what_the_prefix_cache_found() -> None:
    with running(random_micro(context=512)) as small, PatchStudy(small.url) as study:
        prompt = list(range(3, 40))
        for _ in range(2):
            study.complete(prompt, max_tokens=5, ignore_eos=True)
        found = metrics(small)
        assert (found["tokens_total"], found["running"], found["waiting"]) == (10, 0, 0)
        assert found["prefix_hits_total"] >= 2
        longer = PROMPT.replace("add 3", "add 3 then add 3")  # whose new tokens have no partner
        grid = study.sweep(PROMPT, longer, " +", " *")
        assert metrics(small)["cells_total"] == 2 * (len(grid.columns) - len(grid.skipped)) < grid.values.size
        with unhurried(small):
            stream = study.stream(PROMPT, max_tokens=400, ignore_eos=True)
            next(stream)
            until(lambda: metrics(small)["running"] == 1)
            assert metrics(small)["slots"] == 1
            stream.close()


def test_a_run_that_is_evicted_while_it_is_dropped_is_unknown(
    server: Running, alice: PatchStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice.complete(PROMPT, capture=[SITE], run="going", max_tokens=1)
    drop = RunStore.drop

    def late(store: RunStore, run: str) -> None:
        drop(store, run)
        drop(store, run)

    monkeypatch.setattr(RunStore, "drop", late)
    found = refusal(alice.drop, "going")
    assert (found.status, found.code, str(found)) == (404, "unknown_run", "run 'going' was dropped")


def test_the_description_of_a_run_and_its_values_are_of_one_run(
    server: Running, alice: PatchStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is dropped, and another of its name written, between two looks at it."""
    read, renewing = RunStore.positions, []

    def renew(store: RunStore, run: str) -> None:
        store.drop(run)
        with store.writing(run, weights="w", tokens=[1, 2]) as writer:
            writer.append(Site.parse(SITE), [0, 1], torch.zeros(2, 16))

    def late(store: RunStore, run: str, site: Site) -> list[int]:
        if not renewing:
            renewing.append(Thread(target=renew, args=(store, run)))
            renewing[0].start()
            renewing[0].join(0.2)
        return read(store, run, site)

    alice.complete(PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="renewed", max_tokens=1)
    monkeypatch.setattr(RunStore, "positions", late)
    for count in (None, 2):
        found = alice._call("GET", "/v1/runs/renewed", site=SITE)
        assert found["values"]["positions"] == list(range(found["prompt_length"]))
        assert count in (None, found["prompt_length"])
        renewing[0].join()
    alice.drop("renewed")


def test_the_prompts_of_a_patched_cell_are_counted(server: Running, alice: PatchStudy) -> None:
    before = metrics(server, ADMIN)["prompt_tokens_total"]
    alice.cell([5, 6, 7], [5, 6, 8], SITE, position=1)
    assert metrics(server, ADMIN)["prompt_tokens_total"] == before + 6


def test_metrics_count_reasons_within_streams_too_and_bytes_by_key() -> None:
    with running(random_micro(context=512), keys=Keys(KEYS), limits=Limits(store=20_000)) as small:

        def errors(reason: str, path: str = "/v1/completions") -> float:
            return metrics(small, ADMIN).get(f'errors_total{{path="{path}",reason="{reason}"}}', 0.0)

        with PatchStudy(small.url, ALICE) as study, pytest.raises(ServerError, match="needs"):
            list(study.stream(PROMPT, max_tokens=450, ignore_eos=True, run="long", capture=[{"site": SITE, "part": "all"}]))
        assert errors("request_failed") == 1
        assert metrics(small, ADMIN)['requests_total{path="/v1/completions",status="200"}'] == 1
        given = {"headers": bearer(BOB)}
        assert small.http.post("/v1/completions", json={"prompt": "a", "n": -1}, **given).status_code == 422
        assert errors("invalid_field") == 1
        assert small.http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert errors("invalid_api_key", "other") == 1
        assert small.http.get("/nowhere", **given).status_code == 404
        assert errors("404", "other") == 1
        body = {"prompt": PROMPT, "capture": [SITE], "max_tokens": 1, "run": "mine"}
        assert small.http.post("/v1/completions", json=body, **given).status_code == 200
        assert small.http.post("/v1/steering/set", json={"vectors": {"v": [1.0] * 16}}, **given).status_code == 200
        held = {name: value for name, value in metrics(small, ADMIN).items() if name.startswith("held_bytes")}
        kinds = {name.split('"')[1]: value for name, value in held.items() if value}
        assert kinds == {"runs": small.server.store.stats().memory_bytes, "vectors": 16 * 8.0}
        owners = {name.split('"')[3] for name, value in held.items() if value}
        assert len(owners) == 1
        assert not any(key in "".join(held) for key in (ALICE, BOB, ADMIN))


def test_no_page_names_another_host_and_the_reference_has_every_address_and_field(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    for path in ("/", "/docs", "/static/page.js", "/static/page.css"):
        answer = server.http.get(path)
        if path in ("/", "/docs"):
            assert answer.status_code == 200
            assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", answer.text), path
    page = server.http.get("/docs").text
    for path, methods in schema["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in page for method in methods)
    fields = {name for model in schema["components"]["schemas"].values() for name in model.get("properties", {})}
    assert {"steering_vectors", "logprob_token_ids"} <= fields
    assert all(f"<code>{name}</code>" in page for name in fields)


def test_the_tokenizer_is_copied_once_per_thread_and_never_per_request() -> None:
    copies: list[object] = []

    class Heavy(MicroTokenizer):
        def __deepcopy__(self, memo: dict[int, object]) -> "Heavy":
            copies.append(self)
            return Heavy()

    served = replace(random_micro(), tokenizer=Heavy())
    with running(served) as small, PatchStudy(small.url) as study:
        before = len(copies)
        for _ in range(3):
            study.complete(PROMPT, max_tokens=2)
            list(study.stream(PROMPT, max_tokens=2))
        assert len(copies) == before == 2


def test_a_low_priority_is_late_and_never_stuck() -> None:
    """With the engine's own patience of 512 steps per level some 90 others would be answered first."""
    others: list[int] = []
    with running(random_micro(context=512), limits=Limits(rows=1, patience=4)) as small, PatchStudy(small.url) as study:
        done = Event()

        def crowd() -> None:
            with PatchStudy(small.url) as one:
                while not done.is_set():
                    one.complete(PROMPT, max_tokens=8, ignore_eos=True)
                    others.append(1)

        with ThreadPoolExecutor(3) as pool:
            crowds = [pool.submit(crowd) for _ in range(3)]
            try:
                while len(others) < 3:
                    time.sleep(0.01)
                before = len(others)
                study.complete(PROMPT, max_tokens=8, ignore_eos=True, priority=-2)
            finally:
                done.set()
        for one in crowds:
            one.result()
    assert 1 <= len(others) - before <= 45


def test_pages_of_other_hosts_are_refused() -> None:
    with running(random_micro()) as local:
        port = local.url.rpartition(":")[2]
        for headers, status in (
            ({"Host": f"localhost:{port}"}, 200),
            ({"Host": f"evil.example:{port}"}, 400),
            ({"Origin": "http://evil.example"}, 400),
            ({"Origin": local.url}, 200),
        ):
            assert local.http.get("/health", headers=headers).status_code == status, headers


def test_who_comes_while_the_server_drains_is_sent_away_with_the_reason() -> None:
    with running(random_micro()) as one, PatchStudy(one.url) as study:
        one.server.owner._closing = True  # as `close` sets it first
        for call, given in ((study.complete, (PROMPT,)), (study.sweep, (PROMPT, OTHER, " +", " *"))):
            found = refusal(call, *given)
            assert (found.status, found.code) == (503, "unavailable")
            assert "shutting down" in str(found)


# Sweeps


EVENT = re.compile(r"^event: (\w+)\ndata: (.*)$", re.M)


def test_a_sweep_over_http_is_the_sweep_of_the_process(server: Running, alice: PatchStudy) -> None:
    served = random_micro(context=512)
    given: dict[str, Any] = {"answer": " +", "foil": " *", "sites": ["resid_pre", "z"], "heads": True}
    truth = sweep(served.host, clean=PROMPT, corrupt=OTHER, tokenizer=served.tokenizer, **given)
    cells, totals = [], set()

    def progress(some: list[Any], total: int) -> None:
        cells.extend(some)
        totals.add(total)

    found = alice.sweep(PROMPT, OTHER, progress=progress, **given)
    np.testing.assert_allclose(found.values, truth.values, rtol=0, atol=1e-5)
    assert (found.sites, found.positions, found.labels, found.grader) == (truth.sites, truth.positions, truth.labels, truth.grader)
    assert totals == {found.values.size} == {len(cells)}
    at = {(str(cell.target), cell.position): cell.value for cell in cells}
    assert all(at[str(site), p] == found.values[i, j] for i, site in enumerate(found.sites) for j, p in enumerate(found.positions))
    whole = alice._call("POST", "/v1/patch_sweep", {"clean": PROMPT, "corrupt": OTHER, **given})
    assert whole["grid"]["values"] == found.values.tolist()
    assert whole["summary"]["top"][0]["value"] == found.top(1)[0].value
    body = {"clean": PROMPT, "corrupt": OTHER, "stream": True, **given}
    streamed = server.http.post("/v1/patch_sweep", json=body, headers=bearer(ALICE))
    (summary,) = [json.loads(data) for event, data in EVENT.findall(streamed.text) if event == "summary"]
    for one in (whole, summary):
        assert min(one["grid"].pop("seconds").values()) > 0
    assert summary == whole
    for positions in ([2, " sub"], torch.tensor([2, 5]), np.array([5, 2])):
        assert alice.sweep(PROMPT, OTHER, " +", " *", positions=positions).positions == (2, 5)
    assert alice.sweep(PROMPT, OTHER, " +", " *", sites=truth.sites[:2]).sites == truth.sites[:2]

    async def main() -> Any:
        async with AsyncPatchStudy(alice.base_url, ALICE) as study:
            return await study.sweep(PROMPT, OTHER, **given)

    assert np.array_equal(asyncio.run(main()).values, found.values)


def test_a_sweep_over_http_starts_from_a_run_that_a_completion_captured(
    server: Running, alice: PatchStudy, bob: PatchStudy
) -> None:
    given: dict[str, Any] = {"answer": " +", "foil": " *", "sites": ["resid_pre", "z"]}
    truth = alice.sweep(PROMPT, OTHER, **given)
    layers = server.http.get("/v1/study").json()["layers"]
    whole = [{"site": f"blocks.{i}.{point}", "part": "prompt"} for i in range(layers) for point in ("resid_pre", "z")]
    last = {"site": f"blocks.{layers - 1}.resid_post", "part": "last"}
    alice.complete(PROMPT, max_tokens=3, capture=[*whole, last], run="clean")
    found = alice.sweep({"run": "clean"}, OTHER, **given)
    np.testing.assert_allclose(found.values, truth.values, rtol=0, atol=1e-5)
    assert (found.clean, found.corrupt) == (pytest.approx(truth.clean, abs=1e-5), truth.corrupt)
    assert found.alignment == truth.alignment
    missing = refusal(alice.sweep, {"run": "clean"}, OTHER, **given | {"sites": "q"})
    assert (missing.status, missing.param) == (400, "clean")
    assert "capture it too" in str(missing)
    assert "alice" not in str(missing)
    another = refusal(bob.sweep, {"run": "clean"}, OTHER, **given)
    assert (another.status, another.code) == (404, "unknown_run")
    alice.drop("clean")
    assert "was dropped" in str(refusal(alice.sweep, {"run": "clean"}, OTHER, **given))


def test_a_grid_says_that_what_steers_every_request_does_not_act_in_it(alice: PatchStudy, admin: PatchStudy) -> None:
    asked = {"clean": PROMPT, "corrupt": OTHER, "answer": " +", "foil": " *", "sites": ["blocks.0.resid_pre"], "positions": [2]}
    plain = alice._call("POST", "/v1/patch_sweep", asked)
    admin.steer(scope="global", steering_vectors={SITE: {"vector": [0.5] * 16, "scale": 4.0}})
    steered = alice._call("POST", "/v1/patch_sweep", asked)
    with pytest.warns(UserWarning, match=f"base: {SITE}"):
        alice.sweep(PROMPT, OTHER, " +", " *")
    admin.unsteer(scope="global")
    assert steered["grid"]["values"] == plain["grid"]["values"]
    assert plain["summary"]["note"] is None
    assert f"base: {SITE}" in steered["summary"]["note"]


@pytest.mark.parametrize(
    ("given", "status", "param", "sentence"),
    [
        ({"answer": " + 3"}, 400, "answer", "is 2 tokens"),
        ({"answer": "nonsense"}, 400, "answer", "no token matches"),
        ({"sites": "nowhere"}, 400, "sites", "nowhere"),
        ({"corrupt": "nonsense"}, 400, "corrupt", "no token matches"),
        ({"positions": [99]}, 400, "positions", "position 99 is outside"),
        ({"metric": "kl"}, 400, "answer", "takes no answer"),
        ({"metric": "logprob"}, 400, "foil", "takes no foil"),
        ({"foil": None}, 400, "foil", "needs foil"),
        ({"foil": 10**6}, 400, "foil", "is not a token"),
        ({"metric": "other"}, 422, "metric", "metric"),
        ({"foil": " +"}, 400, "foil", "same token"),
    ],
)
def test_a_sweep_is_refused_before_it_starts(alice: PatchStudy, given: Any, status: int, param: str | None, sentence: str) -> None:
    found = refusal(alice.sweep, **{"clean": PROMPT, "corrupt": OTHER, "answer": " +", "foil": " *", **given})
    assert (found.status, sentence in str(found)) == (status, True), str(found)
    assert found.param == param


def test_a_cell_is_what_the_patched_model_answers(alice: PatchStudy) -> None:
    served = random_micro(context=512)
    engine, site = Engine(served.host), Site(1, "z")
    clean, corrupt = (tuple(served.encode(text)) for text in (PROMPT, OTHER))
    (run,) = engine.generate([Request(clean, Sampling(max_new=1), capture=(Capture(site, TokenSelection(positions=(2,))),))])
    share = torch.tensor([[0.0], [1.0]]).expand(2, 8)
    patch = Patch(site, 2, run.captured[site].rows[0], share.clone())
    (truth,) = engine.generate([Request(corrupt, Sampling(max_new=4, logprobs=10, stop_tokens=(0,)), patch=(patch,))])
    found = alice.cell(PROMPT, OTHER, "blocks.1.z[1]", 2, max_tokens=4)
    assert found["token_ids"] == truth.ids
    torch.testing.assert_close([one["logprob"] for one in found["top"]], list(truth.tokens[0].top.values()), rtol=0, atol=1e-5)
    assert refusal(alice.cell, PROMPT, OTHER, "blocks.1.z[7]", 2).status == 400
    assert refusal(alice.cell, PROMPT, OTHER, SITE, 400).status == 400
    refused = refusal(alice.cell, PROMPT, OTHER, SITE, 2, alpha=1e39)  # a number, and infinity in float32
    assert refused.status == 400
    assert "alpha" in str(refused)


# Runs and studies


def test_a_captured_run_is_read_patched_from_and_dropped(alice: PatchStudy) -> None:
    alice.complete(PROMPT, capture=[{"site": SITE, "part": "prompt"}], run="mine", max_tokens=1)
    assert refusal(alice.complete, PROMPT, capture=[SITE], run="mine").status == 409
    served = random_micro(context=512)
    ids = served.encode(PROMPT)
    positions, rows = alice.values("mine", SITE)
    assert positions == list(range(len(ids)))
    torch.testing.assert_close(
        rows, served.host.capture([Site.parse(SITE)], torch.tensor([ids]))[Site.parse(SITE)][0], rtol=0, atol=1e-5
    )
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    one = alice.complete(OTHER, patch=[PATCH], **asked)["choices"][0]["logprobs"]
    other = alice.complete(OTHER, patch=[{**PATCH, "source": rows[3]}], **asked)["choices"][0]["logprobs"]
    assert one == other
    alice.drop("mine")
    assert refusal(alice.values, "mine", SITE).status == 404


def test_tokens_and_alignment(alice: PatchStudy) -> None:
    found = alice._call("POST", "/v1/tokenize", {"text": PROMPT})
    assert (found["tokens"][:3], found["ids"]) == (["<bos>", "# task:", " add"], random_micro().encode(PROMPT))
    found = alice._call("POST", "/v1/align", {"clean": PROMPT, "corrupt": PROMPT + "\n```python\n" + "class Solution:\n"})
    assert (found["partner"], found["differs"]) == ([*range(10), None, None], [])
    assert alice._call("POST", "/v1/align", {"clean": PROMPT, "corrupt": OTHER})["differs"] == [2]
    assert "12 corrupt tokens on 10 clean ones" in found["summary"]


def test_the_runs_of_a_study_are_those_of_its_files(alice: PatchStudy) -> None:
    found = alice._call("GET", "/v1/study_runs")
    arms = {run["arm"]: run for run in found["runs"]}
    assert arms["vanilla"]["finished"] is True
    assert arms["route2"]["finished"] is False
    assert [row["hack"] for row in arms["vanilla"]["curve"]] == [0.0, 0.25, 0.5]
    assert (arms["route2"]["step"], arms["route2"]["steps"], arms["route2"]["rates"]) == (1, 3, None)
    assert arms["vanilla"]["curve"][0]["kl"] is None
    assert arms["vanilla"]["rates"]["run_tests"]["deploy"]["hack"] == 0.25


def test_the_modes_of_a_study_that_names_its_own_are_not_those_of_the_served_model(
    server: Running, alice: PatchStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"known": ["run_tests"], "held_out": ["sentinel"], "honest": "none"}
    (tmp_path / "modes.json").write_text(json.dumps(own))
    monkeypatch.setattr(server.server.served, "modes_of_study", {"known": ["sentinel"], "held_out": []})
    assert alice._call("GET", "/v1/study_runs")["modes"] == {"known": ["sentinel"], "held_out": []}
    monkeypatch.setattr(server.server, "study_runs", tmp_path)
    assert alice._call("GET", "/v1/study_runs")["modes"] == {"known": ["run_tests"], "held_out": ["sentinel"]}


def test_a_curve_is_thinned_before_its_last_ten_steps_whose_mean_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 41)))
    monkeypatch.setattr(study_routes, "MOST_ROWS", 10)
    (run,) = study_routes.read_study(tmp_path)["runs"]
    assert [row["step"] for row in run["curve"]] == [*range(1, 31, 4), *range(31, 41)]


def test_arms_of_two_studies_are_two_and_a_folder_may_be_given_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("strong-1", "strong-12"):
        (run := tmp_path / name / "seed-0" / "vanilla").mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
    found = study_routes.read_study(tmp_path)
    assert [run["arm"] for run in found["runs"]] == ["strong-1/vanilla", "strong-12/vanilla"]
    assert "modes" not in found  # those of the served model
    for name, known in (("strong-1", "sentinel"), ("strong-12", "run_tests")):
        (tmp_path / name / "modes.json").write_text(json.dumps({"known": [known], "held_out": []}))
    found = study_routes.read_study(tmp_path)
    assert (found["modes"], found["modes_differ"]) == ({}, True)
    assert study_routes.read_study(tmp_path / "strong-1")["modes"] == {"known": ["sentinel"], "held_out": []}
    assert found["left_out"] == 0
    monkeypatch.setattr(study_routes, "MOST_RUNS", 1)
    found = study_routes.read_study(tmp_path)
    assert ([run["arm"] for run in found["runs"]], found["left_out"]) == (["strong-1/vanilla"], 1)
    monkeypatch.chdir(tmp_path / "strong-1")
    found = study_routes.read_study(Path("."))
    assert (found["path"], [run["arm"] for run in found["runs"]]) == ("strong-1", ["vanilla"])  # the page takes '' for no study


def test_the_page_and_its_parts_are_served(server: Running) -> None:
    page = server.http.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert server.http.get(name).status_code == 200, name
    assert len(server.http.get("/plotly.min.js").content) > 1_000_000
    paths = server.http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/patch_sweep"):
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


# What ends


def test_health_tells_the_admin_the_last_error_and_nobody_what_was_asked() -> None:
    """The model's own code quotes what it was given, and the store names what it could not keep."""
    served = random_micro(context=512)

    def quoting(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] > 4:
            raise ValueError(f"no place for {PROMPT}")

    def health(key: str | None) -> Any:
        return one.http.get("/health", headers={} if key is None else bearer(key)).json()

    def failed(**body: Any) -> str:
        response = one.http.post("/v1/completions", json={"prompt": PROMPT, **body}, headers=bearer(ALICE))
        assert response.status_code == 422
        until(lambda: health(ADMIN)["last_error"] not in seen, 30)
        seen.append(health(ADMIN)["last_error"])
        assert [health(key).get("last_error", "nothing") for key in (None, "wrong", BOB, ALICE)] == ["nothing"] * 4
        return response.json()["error"]["message"]

    seen: list[str | None] = [None]
    with running(served, keys=Keys(KEYS), limits=Limits(store=1000)) as one:
        assert health(ADMIN)["last_error"] is None
        embedding = next(module for module in served.host.model.modules() if isinstance(module, torch.nn.Embedding))
        handle = embedding.register_forward_pre_hook(quoting)
        assert failed().endswith("failed with ValueError: no place for " + " ".join(PROMPT.split()))
        handle.remove()
        assert seen[-1] == "a forward of this request failed with ValueError"
        assert "'secret'" in failed(run="secret", capture=[SITE])
        assert "1000" in str(seen[-1]).replace(",", "")
        assert "secret" not in str(seen[-1])
    with running(random_micro()) as local:
        assert local.http.get("/health").json()["last_error"] is None


def test_a_dead_engine_ends_every_stream_with_a_reason_and_health_says_so() -> None:
    with running(random_micro(context=512)) as doomed, PatchStudy(doomed.url) as study, unhurried(doomed):
        chunks = study.stream(PROMPT, max_tokens=480, ignore_eos=True)
        next(chunks)

        def die() -> None:
            raise SystemExit("out of memory, for example")

        doomed.server.owner._post(die)
        with pytest.raises(ServerError, match=r"thread failed with SystemExit$"):  # what it said may be of another key
            list(chunks)
        response = doomed.http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine's thread failed with SystemExit"  # this needs no key
        found = refusal(study.complete, PROMPT)
        assert found.status == 503
        assert str(found).endswith("thread failed with SystemExit")


def test_another_address_needs_a_key() -> None:
    from mi_route2.serve.options import Options
    from mi_route2.serve.run import keys_of

    with pytest.raises(ValueError, match="needs a key"):
        keys_of(Options(host="0.0.0.0"))
    assert not keys_of(Options())


def test_models_are_found_by_name_and_refused_with_what_there_is(tmp_path: Path) -> None:
    assert load(MODEL).name == "micro"
    with pytest.raises(ValueError, match="choose micro, smollm2"):
        load("no.such.module:function")
    with pytest.raises(ValueError, match="return a mi_route2"):
        load("builtins:dict")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(str(tmp_path / "nothing"))
    assert refusal(PatchStudy("http://127.0.0.1:9").complete, PROMPT).code == "unreachable"


def test_a_stream_whose_client_goes_before_its_first_event_is_ended_too() -> None:
    """Its generator has not begun, so that nothing in it runs."""
    ended: list[bool] = []

    async def events() -> Any:
        yield "never"

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(_: Any) -> None:
        raise OSError("the client has gone")

    async def main() -> None:
        with pytest.raises((OSError, ClientDisconnect)):
            await Events(events(), lambda: ended.append(True))({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    asyncio.run(main())
    assert ended == [True]
