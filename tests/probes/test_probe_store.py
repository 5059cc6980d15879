"""What loads from a folder or from the Hub is what was saved; any other folder is refused with a reason."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub
import pytest
import torch
import uvicorn
from families import make_batch, make_policy, make_rollouts
from huggingface_hub import ModelCard

from mi_route2 import MaskRoute, MaskSpec, Monitor, PairBatch, Site, Steer, Steering
from mi_route2.probes.affine import AffineProbe
from mi_route2.probes.direction import DirectionFitter, DirectionProbe
from mi_route2.probes.store import CARD, CONFIG, TENSORS, Card, from_pretrained, save_pretrained
from mi_route2.routing import EraseRoute, StepContext
from mi_route2.steering.specs import Clamp, Vector
from mi_route2.tensor_files import write_tensors

WEIGHT = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DIRECTION = DirectionFitter(WEIGHT).fit().direction
BIAS = torch.zeros(1, dtype=torch.float64)
SITE = Site(1, "resid_post")
AT = Card("org/model", str(SITE), {"auroc": 0.875, "recall_1pct": None}, "labels of the oracle")
PROBE = AffineProbe(WEIGHT, -0.3, "hack")


@pytest.mark.parametrize(
    "probe",
    [DirectionProbe(DIRECTION, "cosine", 2), DirectionProbe(DIRECTION, "projection"), PROBE],
    ids=["cosine", "projection", "affine"],
)
def test_a_saved_probe_scores_the_same_bit_for_bit_and_its_card_is_the_hubs(tmp_path: Path, probe: Any) -> None:
    h, mask = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(3, 4, dtype=torch.bool)
    save_pretrained(probe, tmp_path / "probe", AT)
    loaded, card = from_pretrained(tmp_path / "probe")
    assert (type(loaded), loaded.positive, card) == (type(probe), probe.positive, AT)
    assert torch.equal(loaded.score_tokens(h), probe.score_tokens(h))
    assert torch.equal(loaded.score_rollouts(h, mask), probe.score_rollouts(h, mask))
    data = ModelCard.load(tmp_path / "probe" / CARD).data.to_dict()
    assert (data["library_name"], data["base_model"], data["site"]) == ("mi-route2", "org/model", str(SITE))
    assert (data["positive"], data["quality"]) == (probe.positive, AT.quality)
    assert {path.name for path in (tmp_path / "probe").iterdir()} == {CARD, CONFIG, TENSORS}
    save_pretrained(probe, tmp_path / "again", AT)
    for name in (CARD, CONFIG, TENSORS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "probe" / name).read_bytes()


def test_saved_steering_acts_the_same(tmp_path: Path) -> None:
    v, later = Vector(torch.randn(6, generator=torch.Generator().manual_seed(2))), Site(2, "resid_pre")
    gate = Monitor(SITE, WEIGHT, threshold=0.3, gates=(), quarantine="close", adds=(Steer(later, v, 0.5),), name="gate")
    decode, clamps = (Steer(later, WEIGHT, -2.0),), (Clamp(SITE, v, high=1.5),)
    steering = Steering((Steer(SITE, v),), decode=decode, clamps=clamps, monitors=(gate,))
    save_pretrained(steering, tmp_path / "s", Card("org/model"))
    loaded, _ = from_pretrained(tmp_path / "s")
    assert loaded == steering
    assert loaded.fingerprint() == steering.fingerprint()
    assert ModelCard.load(tmp_path / "s" / CARD).data.to_dict()["site"] == [str(SITE), str(later)]
    with pytest.raises(ValueError, match="'away' is not resolved"):
        save_pretrained(Steering((Steer(SITE, "away"),)), tmp_path / "named", Card("org/model"))


def routed(route: Any, policy: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The decision of a step, and the kept gradients that it leaves."""
    policy.model.zero_grad()
    context = StepContext(torch.Generator().manual_seed(0))
    decision = route.backward(policy, make_batch(), lambda logits, batch: logits.double().square().mean((1, 2)), context)
    return decision, {name: p.grad.clone() for name, p in policy.adapters.kept_parameters().items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda pairs: MaskRoute.from_pairs(pairs, MaskSpec(score="act", negative_scale=0.3), l1=0.01),
        lambda pairs: MaskRoute.from_pairs(pairs, MaskSpec(score="full", score_policy="ablated", tau=0.01)),
        EraseRoute.from_pairs,
    ],
    ids=["act", "full", "erase"],
)
def test_a_saved_route_decides_and_learns_the_same_without_its_quarantine(tmp_path: Path, make: Callable) -> None:
    _, policy = make_policy("MicroGPT", "svd")
    route = make(PairBatch(make_rollouts(seed=3), make_rollouts(seed=4), "pairs"))
    with pytest.raises(ValueError, match=r"call route.refresh\(policy, step\) first"):
        save_pretrained(route, tmp_path / "route", Card("org/model"))
    route.refresh(policy, step=0)
    save_pretrained(route, tmp_path / "route", Card("org/model"))
    loaded, _ = from_pretrained(tmp_path / "route")
    assert loaded.spec == route.spec
    assert loaded.refresh(policy, step=5) is None  # it has no pairs to fit again
    (decision, gradients), (expected, wanted) = routed(loaded, policy), routed(route, policy)
    for own, other in ((decision.scores, expected.scores), (decision.flags, expected.flags)):
        assert own is other or torch.equal(own, other)
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    data = ModelCard.load(tmp_path / "route" / CARD).data.to_dict()
    assert (data["positive"], data["site"]) == ("hack", sorted(policy.adapters.sites))
    saved = (tmp_path / "route" / TENSORS).stat().st_size
    assert saved < 4096 + sum(v.nbytes for v in route.directions.vectors.values())  # and no factor of an adapter


@pytest.mark.parametrize(
    ("change", "tensors", "fault"),
    [
        ({}, None, None),  # so that every refusal below is due to its one change
        ({"format": "something else"}, None, "format"),
        ({"kind": "mlp"}, None, "not one of affine, direction"),
        ({"settings": {"score": "cosine"}}, None, "score"),
        ({"card": {"base_model": 3}}, None, "base_model"),
        ({}, {"weight": WEIGHT}, "bias"),
        ({}, {"weight": WEIGHT, "bias": BIAS, "extra": 2 * WEIGHT}, "extra"),
        ({}, {"weight": WEIGHT[:, None].clone(), "bias": BIAS}, r"\[6, 1\]"),
        ({}, {"weight": WEIGHT, "bias": 2 * WEIGHT}, "one element"),
        ({}, {"weight": WEIGHT * torch.inf, "bias": BIAS}, "infinite"),
        ({"kind": "direction"}, {"direction": 2 * DIRECTION}, "unit vector"),
        ({"kind": "direction", "settings": {"score": "dot"}}, {"direction": DIRECTION}, "cosine"),
        ({"kind": "steering", "settings": {"decode": [{"site": "blocks.1.resid_post", "vector": "gone"}]}}, None, "gone"),
        ({"kind": "mask", "settings": {"spec": {}}}, None, "directions"),
    ],
)
def test_a_folder_that_is_not_exactly_what_was_saved_is_refused_in_one_line(tmp_path: Path, change, tensors, fault) -> None:
    save_pretrained(PROBE, folder := tmp_path / "p", AT)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | change))
    if tensors is not None:
        write_tensors(folder / TENSORS, tensors, {})
    if fault is None:
        from_pretrained(folder)
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-8])
    with pytest.raises(ValueError, match=fault or "safetensors") as refused:
        from_pretrained(folder)
    assert "\n" not in str(refused.value)


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="artifact must be AffineProbe"):
        save_pretrained(WEIGHT, tmp_path / "p", AT)
    with pytest.raises(ValueError, match="A probe reads one site"):
        save_pretrained(PROBE, tmp_path / "p", Card("org/model"))
    assert not list(tmp_path.iterdir())
    save_pretrained(PROBE, tmp_path / "p", AT)
    with pytest.raises(FileExistsError, match="is not empty"):
        save_pretrained(PROBE, tmp_path / "p", AT)
    with pytest.raises(FileNotFoundError, match="is no folder: give one that save_pretrained wrote"):
        from_pretrained(tmp_path / "q")


# The Hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(hub.app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    hub.repos.clear()


SCRIPT = """
import sys
from pathlib import Path
from mi_route2.probes.store import from_pretrained, push_to_hub, save_pretrained
verb, place, name = sys.argv[1:]
if verb == "push":
    print(push_to_hub(*from_pretrained(place)[:1], name, from_pretrained(place)[1]))
else:
    save_pretrained(*from_pretrained(name)[:1], place, from_pretrained(name)[1])
"""


def client(tmp_path: Path, endpoint: str, *words: str, token: str = "hf_test") -> str:
    """Run the true client in a process of its own, which reads the endpoint when it starts."""
    # xet is a protocol of its own in a compiled library; without it the client speaks git-lfs
    settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "0"}
    run = subprocess.run([sys.executable, "-c", SCRIPT, *words], env=environment, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else run.stderr.strip().splitlines()[-1]


def test_what_is_pushed_to_the_hub_loads_from_it(tmp_path: Path, endpoint: str) -> None:
    save_pretrained(PROBE, tmp_path / "own", AT)
    assert client(tmp_path, endpoint, "push", str(tmp_path / "own"), "org/probe") == f"{endpoint}/org/probe"
    assert set(hub.repos["org/probe"]) == {CARD, CONFIG, TENSORS}
    assert client(tmp_path, endpoint, "load", str(tmp_path / "loaded"), "org/probe") == ""
    for name in (CARD, CONFIG, TENSORS):
        assert (tmp_path / "loaded" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    other = AffineProbe(2 * WEIGHT, 0.0, "hack")  # a second push is a new version
    shutil.rmtree(tmp_path / "own")
    save_pretrained(other, tmp_path / "own", AT)
    assert client(tmp_path, endpoint, "push", str(tmp_path / "own"), "org/probe") == f"{endpoint}/org/probe"
    assert client(tmp_path, endpoint, "load", str(tmp_path / "second"), "org/probe") == ""
    assert torch.equal(from_pretrained(tmp_path / "second")[0].weight, 2 * WEIGHT)
    refused = client(tmp_path, endpoint, "load", str(tmp_path / "none"), "org/other")
    assert refused.startswith(f"OSError: org/other is no folder here, and {endpoint} answers: Client error '404 Not Found'")
    assert "401" in client(tmp_path, endpoint, "push", str(tmp_path / "own"), "org/mine", token="hf_wrong")
    assert "org/mine" not in hub.repos
