"""Patches, steering, captures and monitors per request on unmodified vLLM, with the requests and results of our own engine.

    engine = launch("path/to/model", dtype="float32")
    results = engine.generate([Request((3, 4, 5), Sampling(max_new=8), steering=Steering(decode=(Steer(site, vector),)))])

    with VllmSampler("path/to/model", dtype=torch.float32) as sampler:      # completions for training, from a Policy
        completions = sampler(policy, prompts, max_new=64, temperature=1.0, generator=generator, ends=(2,))

vLLM is an environment of its own (it pins torch and transformers); this package imports without it. See ``docs/scale.md``.
"""

from mi_route2.vllm.client import EXTENSION, SETTINGS, VllmEngine, launch
from mi_route2.vllm.sampler import VllmSampler

__all__ = ["EXTENSION", "SETTINGS", "VllmEngine", "VllmSampler", "launch"]
