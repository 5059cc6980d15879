"""Sampling: the softmax's own distribution, one stream of random numbers a row, and rows that leave without a trace."""

import pytest
import torch
from torch import Tensor

from studies.environments.micro.model import MicroGPT, generate
from studies.environments.micro.settings import MicroConfig
from studies.environments.sampling import draw

VOCAB, EOS = 7, 0


def make_model() -> MicroGPT:
    generator = torch.Generator().manual_seed(0)
    model = MicroGPT(MicroConfig(VOCAB, d=16, layers=1, heads=2, mlp=16, context=24), generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


MODEL = make_model()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(drawn: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(drawn)
    return (((torch.bincount(drawn, minlength=len(probabilities)) - expected) ** 2 / expected).sum()).item()


def prompts(n: int) -> Tensor:
    return torch.randint(1, VOCAB, (n, 4), generator=seeded(5))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.3, 2.0, 0.0])
    uniforms = torch.rand(20_000, generator=seeded(0))
    drawn = draw(logits.expand(20_000, -1), uniforms, temperature)
    # 23.5 is the .9999 quantile of chi-square with 4 degrees of freedom.
    assert chi_square(drawn, (logits / temperature).softmax(-1)) < 23.5
    assert chi_square(drawn, (logits / (1.3 * temperature)).softmax(-1)) > 23.5


def test_first_and_second_tokens_follow_the_model() -> None:
    n = 6000
    prompt = prompts(1).expand(n, -1)
    completions = generate(MODEL, prompt, max_new=2, generator=seeded(1), eos=EOS)
    first = MODEL(prompt[:1])[0, -1].softmax(-1)
    # 27.9 is the .9999 quantile of chi-square with 6 degrees of freedom.
    assert chi_square(completions[:, 0], first) < 27.9
    token = int(torch.bincount(completions[:, 0])[1:].argmax()) + 1
    second = MODEL(torch.cat((prompt[:1], torch.tensor([[token]])), 1))[0, -1].softmax(-1)
    assert chi_square(completions[completions[:, 0] == token, 1], second) < 27.9


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_model_without_probabilities_samples_nothing(broken: float) -> None:
    """One bad row among good ones; it would be the vocabulary's last token for ever, which earns nothing and hacks nothing."""
    logits = torch.zeros(3, VOCAB)
    logits[1, 2] = broken
    with pytest.raises(ValueError, match="NaN or infinite"):
        draw(logits, torch.rand(3, generator=seeded(0)))
    diverged = make_model()
    with torch.no_grad():
        diverged.unembed.weight[3] = broken
    with pytest.raises(ValueError, match="did it diverge"):
        generate(diverged, prompts(2), max_new=4, generator=seeded(0), eos=EOS)


def naive(ids: Tensor, max_new: int, seed: int) -> Tensor:
    """The same draws without a cache, one row at a time, and no row ever leaves."""
    uniforms = torch.rand(len(ids), max_new, dtype=torch.float64, generator=seeded(seed))
    rows = []
    for row, u in zip(ids, uniforms, strict=True):
        for step in range(max_new):
            row = torch.cat((row, draw(MODEL(row[None])[:, -1], u[step : step + 1])))
        new = row[ids.shape[1] :]
        ended = (new == EOS).cumsum(0) > 0
        rows.append(new.masked_fill(ended, EOS))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(5))
def test_caching_batching_and_leaving_rows_change_no_token(seed: int) -> None:
    ids = prompts(24)
    completions = generate(MODEL, ids, max_new=12, generator=seeded(seed), eos=EOS)
    assert torch.equal(completions, naive(ids, 12, seed))
    lengths = (completions != EOS).sum(1)
    assert lengths.min() < lengths.max()


def test_the_generator_decides_and_moves_on_alike_however_long_the_rows_are() -> None:
    generator = seeded(0)
    first, second = (generate(MODEL, prompts(16), max_new=8, generator=generator, eos=EOS) for _ in range(2))
    again = generate(MODEL, prompts(16), max_new=8, generator=seeded(0), eos=EOS)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    generator = seeded(0)
    torch.rand(16, 8, dtype=torch.float64, generator=generator)
    assert torch.equal(second, generate(MODEL, prompts(16), max_new=8, generator=generator, eos=EOS))
