"""Features of a dictionary: edits keep the error, and effects are slopes of the score and add up to attribution patching."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, WIDTH, make_family
from torch import Tensor, nn

from mi_route2.hosts import HOSTS, Host, open_host
from mi_route2.patching import Dictionary, attribute
from mi_route2.sites import Site

FEATURES = 40
SITE, INTO = Site(1, "resid_pre"), Site(0, "mlp_in")
CLEAN, CORRUPT = (torch.randint(3, VOCAB, (5,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
ASKED: dict[str, Any] = {"clean": CLEAN, "corrupt": CORRUPT, "answer": 4, "foil": 9}


class ReluCoder(nn.Module):
    """One hidden layer of rectified features, trained for a few steps to give ``y`` for ``x`` with few of them."""

    def __init__(self, x: Tensor, y: Tensor):
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            self.encoder, self.decoder = nn.Linear(WIDTH, FEATURES).double(), nn.Linear(FEATURES, WIDTH).double()
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            for _ in range(40):
                features = self.encode(x)
                loss = (self.decode(features) - y).pow(2).mean() + 0.01 * features.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).relu()

    def decode(self, f: Tensor) -> Tensor:
        return self.decoder(f)


@cache
def made(name: str = "torch", *, transcoder: bool = False) -> tuple[Host, Dictionary]:
    host = open_host(name, make_family("GPT2"))
    tokens = torch.randint(3, VOCAB, (16, 8), generator=torch.Generator().manual_seed(0))
    output = Site(0, "mlp_out")
    values = host.capture([SITE, INTO, output], tokens)
    if transcoder:
        return host, Dictionary(INTO, ReluCoder(values[INTO], values[output]), output)
    return host, Dictionary(SITE, ReluCoder(values[SITE], values[SITE]))


def logits(host: Host, edits: Any) -> Tensor:
    with torch.no_grad(), host.hooks(edits):
        return host.logits(CORRUPT[None])


def active(dictionary: Dictionary, host: Host) -> int:
    """A feature that both prompts have at the last position."""
    both = torch.cat([dictionary.read(host, tokens[None])[0, -1:] for tokens in (CLEAN, CORRUPT)])
    return int(both.min(0).values.argmax())


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("transcoder", [False, True])
def test_an_edit_moves_the_site_along_one_decoder_column(name: str, transcoder: bool) -> None:
    host, dictionary = made(name, transcoder=transcoder)
    written = dictionary.output or dictionary.site
    features, feature = dictionary.read(host, CORRUPT[None]), active(dictionary, host)
    activation, column = features[..., feature], dictionary.sae.decoder.weight[:, feature].detach()
    assert activation[0, -1] > 0
    for same in ({"scale": 1}, {"add": 0.0}, {"to": activation}):
        assert torch.equal(logits(host, dictionary.edit(feature, **same)), logits(host, {}))
    other = dictionary.read(host, CLEAN[None])[..., feature]
    for edit, change in (
        ({"to": 0}, -activation),
        ({"scale": 0.0}, -activation),
        ({"scale": 3}, 2 * activation),
        ({"add": 2.5}, torch.full_like(activation, 2.5)),
        ({"to": other}, other - activation),
    ):
        by_hand = logits(host, {written: lambda x, change=change: x + change[..., None] * column})
        found = logits(host, dictionary.edit(feature, **edit))
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)
        assert not torch.allclose(found, logits(host, {}), atol=1e-6)


def score(host: Host, edits: Any) -> float:
    last = logits(host, edits)[0, -1]
    return float(last[4] - last[9])


@pytest.mark.parametrize("transcoder", [False, True])
def test_effects_are_slopes_and_add_up_to_attribution_patching(transcoder: bool) -> None:
    host, dictionary = made(transcoder=transcoder)
    effects = dictionary.attribute(host, **ASKED)
    assert effects.values.shape == (5, FEATURES)
    assert (effects.positions, effects.corrupt) == ((0, 1, 2, 3, 4), pytest.approx(score(host, {})))
    features, clean = (dictionary.read(host, tokens[None]) for tokens in (CORRUPT, CLEAN))
    top = effects.top(3)
    assert [abs(one.value) for one in top] == effects.values.abs().flatten().topk(3).values.tolist()
    for one in (*top, effects.top(10**6)[FEATURES]):
        assert one.position is not None
        step = torch.zeros(1, 5, dtype=torch.float64)
        step[0, one.position] = (clean - features)[0, one.position, one.feature]
        ends = [score(host, dictionary.edit(one.feature, add=share * step)) for share in (1e-4, -1e-4)]
        assert one.value == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5)
    whole = attribute(host, sites=dictionary.output or dictionary.site, **ASKED).effect[0]
    np.testing.assert_allclose(effects.values.sum(1) + effects.errors, whole, rtol=0, atol=1e-12)
    together = dictionary.attribute(host, together=True, **ASKED)
    assert (together.positions, together.labels) == ((None,), ("all",))
    torch.testing.assert_close(together.values[0], effects.values.sum(0))
    assert all(p.grad is None for p in host.model.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(dictionary.attribute(host, positions=[3], **ASKED).values[0], effects.values[3])


def test_a_dictionary_of_another_dtype_and_heads_is_used_as_it_is() -> None:
    """A float32 dictionary of ``z`` whose encoder joins the heads, as those of sae-lens do."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, FEATURES, generator=torch.Generator().manual_seed(0)))

        def encode(self, x: Tensor) -> Tensor:
            self.heads = x.shape[-2:]
            assert x.dtype == torch.float32
            return (x.flatten(-2) @ self.weight).relu()

        def decode(self, f: Tensor) -> Tensor:
            return (f @ self.weight.T).unflatten(-1, self.heads)

    host, dictionary = made()[0], Dictionary(Site(0, "z"), Flat())
    effects = dictionary.attribute(host, **ASKED)
    whole = attribute(host, sites=Site(0, "z"), **ASKED).effect[0]
    np.testing.assert_allclose(effects.values.sum(1) + effects.errors, whole, rtol=0, atol=1e-5)
    assert torch.equal(logits(host, dictionary.edit(3, scale=1)), logits(host, {}))
    assert not torch.equal(logits(host, dictionary.edit(3, add=1)), logits(host, {}))


def test_wrong_dictionaries_and_edits_are_answered() -> None:
    host, dictionary = made()
    for wrong in ({}, {"to": 0, "add": 1}):
        with pytest.raises(ValueError, match="exactly one of to=, scale= and add="):
            dictionary.edit(0, **wrong)
    for feature in (-1, FEATURES):
        with pytest.raises(ValueError, match=f"does not exist: this dictionary has 0..{FEATURES - 1}"):
            logits(host, dictionary.edit(feature, to=0))
    with pytest.raises(ValueError, match="which comes before it"):
        Dictionary(SITE, dictionary.sae, Site(0, "mlp_out"))
    with pytest.raises(ValueError, match="this Linear has no encode"):
        Dictionary(SITE, nn.Linear(2, 2))
