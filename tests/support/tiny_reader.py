"""A tiny model of the lanes study in float64, and streams of repetitive text for it to read."""

import torch
from torch import Tensor

from studies.lanes.config import BOS, LanesConfig
from studies.lanes.model import LanesModel, kinds_of


def byte_rows(rows: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(0, BOS, (rows, length), generator=torch.Generator().manual_seed(seed))


def moved_model(config: LanesConfig, seed: int = 0, moved: float = 0.3) -> LanesModel:
    """In float64, every control moved off its start."""
    generator = torch.Generator().manual_seed(seed)
    model = LanesModel(config, generator).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if kinds_of(model)[name] == "control":
                p += moved * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def tiny_reader(seed: int = 0, *, learned: bool = True) -> LanesModel:
    """Two blocks of 8 features, the second behind the fork; its output projections are not 0 and its controls off their start."""
    generator = torch.Generator().manual_seed(seed)
    config = LanesConfig(layers=2, d_model=8, heads=2, mlp=2, lane_start=1, zero_init=False, learned=learned)
    model = LanesModel(config, generator).double()
    with torch.no_grad():
        model.embed.weight.mul_(20)
        for own in model.parameters():
            own.add_(0.1 * torch.randn(own.shape, generator=generator, dtype=own.dtype))
    return model


def tiny_stream(n: int, seed: int = 0) -> Tensor:
    """BOS and a text of four letters, in which most letters follow from the one before; a new document every 41 tokens."""
    generator = torch.Generator().manual_seed(seed)
    letters = [0]
    for noise in torch.rand(n, generator=generator).tolist():
        letters.append((letters[-1] + 1) % 4 if noise < 0.9 else int(noise * 1000) % 4)
    tokens = torch.tensor(letters[:n]) + ord("a")
    tokens[::41] = BOS
    return tokens
