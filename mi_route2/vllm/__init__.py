"""Patches, steering, captures and monitors per request on unmodified vLLM, with the requests and results of our own engine.

    engine = launch("path/to/model", dtype="float32")
    results = engine.generate([Request((3, 4, 5), Sampling(max_new=8), steering=Steering(decode=(Steer(site, vector),)))])

vLLM is an environment of its own (it pins torch and transformers); this package imports without it. See ``docs/vllm.md``.
"""

from mi_route2.vllm.client import EXTENSION, SETTINGS, VllmEngine, launch

__all__ = ["EXTENSION", "SETTINGS", "VllmEngine", "launch"]
