"""vLLM as the sampler of a policy in training: its adapters are one LoRA there, read anew whenever they have changed.

    y = W x + [B | B_q] [A; A_q] x           rank r + k, lora_alpha = rank; A_q and B_q only if the quarantine is on

    with VllmSampler("path/to/base", dtype=torch.float32) as sampler:
        completions = sampler(policy, prompts, max_new=64, temperature=1.0, generator=generator, ends=(2,))

vLLM never reads a number again, and keeps the prefixes of a name. So adapters that have changed, if by a single bit, get another
number, name and folder, and the former ones are dropped. After each sampling vLLM's log-probabilities are compared with torch's.
"""

import itertools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mi_route2.adapters.attach import Adapters
from mi_route2.adapters.io import export_peft, places
from mi_route2.adapters.linear import LoRA
from mi_route2.checks import checked
from mi_route2.rollouts import Policy, Rollouts, still
from mi_route2.vllm.client import abandon, preserving_process, rank_of_vllm
from mi_route2.vllm.facts import COLDEST, imported

TOLERANCE: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType({torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.2, 2.0)})
"""Dtype of vLLM -> how far log-probabilities may be from torch's, in the mean over tokens and at one (``docs/scale.md``)."""


def demand_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for a dtype in which vLLM's log-probabilities were never compared with torch's."""
    if dtype not in TOLERANCE:
        names = ", ".join(str(known).removeprefix("torch.") for known in TOLERANCE)
        raise ValueError(f"vLLM does not compute in {dtype}: choose from {names}")


def lora_settings(adapters: Adapters) -> dict[str, Any]:
    """Return the settings of ``vllm.LLM`` under which it can run the adapters, now and after any training.

    Raises:
        ValueError: They are of a higher rank than any LoRA of vLLM.
    """
    ranks = {
        path: sum(
            branch.kept.rank + (branch.quarantine.rank if isinstance(branch.quarantine, LoRA) else 0)
            for branch, _ in place.branches
        )
        for path, place in places(adapters).items()
    }
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_of_vllm(max(ranks.values()))}


class PolicyLora:
    """Adapters of a policy as the only LoRA of a vLLM.

    Args:
        llm: A ``vllm.LLM`` with ``lora_settings(adapters)``, to which nothing else gives LoRAs.
        adapters: The adapters.
    """

    def __init__(self, llm: Any, adapters: Adapters):
        self.llm, self.adapters = llm, adapters
        self._numbers = itertools.count(1)
        self._read: dict[str, Tensor] = {}
        self._request: Any = None
        self._folder: TemporaryDirectory[str] | None = None

    def request(self) -> Any:
        """Return vLLM's request for the adapters as they are, and are switched, now; ``None`` if both are off.

        Raises:
            ValueError: A value is not finite, or another parameter of the model is trained too.
            RuntimeError: The adapters are merged or detached, or vLLM did not take them.
        """
        self.adapters.demand_live()
        both = {id(p) for p in (*self.adapters.kept_parameters().values(), *self.adapters.quarantine_parameters().values())}
        for name, p in self.adapters.model.named_parameters():
            if p.requires_grad and id(p) not in both:
                raise ValueError(f"vLLM reads the base once, and would sample without what {name} learns: freeze it")
        mode = self.adapters.mode
        if mode == "reference":
            return None
        now = self.adapters.tensors(quarantine=mode == "full")
        # Bytes are compared, because torch counts no writes through p.data, and a permutation keeps every sum.
        if now.keys() != self._read.keys() or not all(torch.equal(value, self._read[name]) for name, value in now.items()):
            self._load(mode)
            self._read = {name: value.clone() for name, value in now.items()}
        return self._request

    def _load(self, mode: Any) -> None:
        self._folder = self._folder or TemporaryDirectory(prefix="mi-route2-sampler-")
        self._read = {}  # an error below must not leave the former adapters as current
        number, former, engine = next(self._numbers), self._request, self.llm.llm_engine
        name = f"policy {number}"
        folder = Path(self._folder.name) / name
        export_peft(self.adapters, folder, which=mode, verify=False)  # its log-probabilities are compared
        self._request = import_module("vllm.lora.request").LoRARequest(name, number, str(folder))
        engine.add_lora(self._request)
        if former is not None:
            engine.remove_lora(former.lora_int_id)
            shutil.rmtree(former.lora_path)
        if engine.list_loras() != {number}:
            raise RuntimeError(
                f"vLLM has the LoRAs {sorted(engine.list_loras())} and not {number} alone: give it no LoRAs yourself"
            )
        self.llm.reset_prefix_cache()  # memory only: the prefixes of the former name are never found again

    def close(self) -> None:
        """Remove the LoRA from vLLM, and first of all the folder that it was read from."""
        request, folder, self._request, self._folder, self._read = self._request, self._folder, None, None, {}
        if folder is not None:
            folder.cleanup()
        if request is not None:
            self.llm.llm_engine.remove_lora(request.lora_int_id)


def refuse_stale(theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> None:
    """Compare log-probabilities of sampled tokens by vLLM and by torch.

    Raises:
        RuntimeError: They are further apart than rounding in ``dtype``.
    """
    gaps = (theirs.double() - ours.double()).abs()
    mean, largest = float(gaps.mean()), float(gaps.max())
    if not (mean <= TOLERANCE[dtype][0] and largest <= TOLERANCE[dtype][1]):  # also NaN
        raise RuntimeError(
            f"vLLM gives tokens that it sampled log-probabilities that are {mean:.3g} from torch's in the mean and {largest:.3g} "
            f"at one, where rounding in {str(dtype).removeprefix('torch.')} explains {TOLERANCE[dtype][0]:g} and "
            f"{TOLERANCE[dtype][1]:g}: it runs other weights (stale adapters, or another base)"
        )


@torch.no_grad()
def _logprobs(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the policy's log-probabilities of a completion's tokens."""
    row = Rollouts.from_lists([list(prompt)], [list(completion)], pad=0).to(next(policy.model.parameters()).device)
    with still(policy.model):  # vLLM drops nothing
        # not policy.logprobs: that of a TRL trainer's policy is at its temperature, and vLLM's are at 1
        return row.logprobs(policy.logits(row))[row.predictors].float().cpu()


def refuse_other(answers: Iterable[Any], policy: Policy, dtype: torch.dtype) -> None:
    """Compare log-probabilities of what vLLM sampled, at temperature 1, with the policy's; one by one, to hold few logits.

    Raises:
        RuntimeError: They are further apart than rounding in ``dtype``.
    """
    theirs, ours = list[float](), list[Tensor]()
    for answer in answers:
        completion = list(answer.outputs[0].token_ids)
        theirs += [kept[token].logprob for kept, token in zip(answer.outputs[0].logprobs, completion, strict=True)]
        ours.append(_logprobs(policy, answer.prompt_token_ids, completion))
    refuse_stale(torch.tensor(theirs), torch.cat(ours), dtype)


def spread(count: int, chosen: int) -> list[int]:
    """Return up to ``chosen`` of ``count`` numbers, from the first to the last."""
    return sorted({round(i) for i in torch.linspace(0, count - 1, min(chosen, count)).tolist()})


class VllmSampler:
    """Sampler of a policy's completions on a vLLM in this process; see the module.

    vLLM starts at the first call, with its own copy of the base model, and belongs to that policy until ``close``.

    Args:
        base: Folder of the checkpoint that the adapters are attached to.
        dtype: Dtype of the policy's model.
        checked: Number of completions of each call whose log-probabilities are computed in torch too, for ``refuse_stale``.
        **settings: Settings of ``vllm.LLM``, for example ``max_model_len``.

    Raises:
        ValueError: vLLM does not compute in ``dtype``, or ``checked`` is below 1.
    """

    def __init__(self, base: Path | str, *, dtype: torch.dtype, checked: int = 4, **settings: Any):
        demand_dtype(dtype)
        if checked < 1:
            raise ValueError(f"checked is {checked}: without a check stale adapters would not be noticed, choose at least 1")
        self._base, self._dtype, self._checked, self._settings = base, dtype, checked, settings
        self._lora: PolicyLora | None = None

    def __enter__(self) -> "VllmSampler":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @checked
    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        max_new: int,
        temperature: float,
        generator: torch.Generator,
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Sample one completion per prompt from the policy as it is switched now, up to and including the first token of ``ends``.

        Args:
            policy: The policy; the same one at each call.
            prompts: Token ids of each prompt.
            max_new: Tokens of the longest completion.
            temperature: Temperature, at least ``COLDEST``.
            generator: Draws one seed per completion. The completions of a seed are the same up to rounding, and no bit is promised.
            ends: Tokens that end a completion.

        Raises:
            ModuleNotFoundError: vLLM is not installed.
            ValueError: A number is out of range, a completion might not fit vLLM's ``max_model_len``, the policy is another one, or
                its adapters are of too high a rank for vLLM.
            RuntimeError: The log-probabilities of vLLM are not those of the policy.
        """
        if temperature < COLDEST:
            raise ValueError(f"temperature = {temperature} is not possible: vLLM would sample at {COLDEST}, choose at least that")
        if not prompts:
            return []
        lora = self._lora = self._lora or PolicyLora(self._start(policy.adapters), policy.adapters)
        if lora.adapters is not policy.adapters:
            raise ValueError("this sampler was started for another policy's adapters: close it, and it starts again for these")
        # vLLM would end a completion there as if it had max_new tokens.
        longest, room = max(map(len, prompts)) + max_new, lora.llm.llm_engine.model_config.max_model_len
        if longest > room:
            raise ValueError(
                f"a prompt of {longest - max_new} tokens and max_new = {max_new} need {longest} positions, and this vLLM has "
                f"{room}: start it with a larger max_model_len, or choose a smaller max_new"
            )
        seeds = torch.randint(2**53, (len(prompts),), generator=generator, device=generator.device).tolist()
        common = {"max_tokens": max_new, "temperature": float(temperature), "stop_token_ids": list(ends), "logprobs": 0}
        params = [imported().SamplingParams(**common, seed=seed, ignore_eos=True, detokenize=False) for seed in seeds]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        request = lora.request()
        try:
            answers = lora.llm.generate(inputs, params, use_tqdm=False, lora_request=request)
        except BaseException:
            abandon(lora.llm)
            raise
        completions = [list(answer.outputs[0].token_ids) for answer in answers]
        refuse_other((answers[row] for row in spread(len(answers), self._checked)), policy, self._dtype)
        return completions

    def _start(self, adapters: Adapters) -> Any:
        """Return a new ``vllm.LLM`` of the base model, with room for the adapters."""
        room = lora_settings(adapters)
        vllm = imported()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
        usual = {"skip_tokenizer_init": True, "dtype": str(self._dtype).removeprefix("torch.")}
        with preserving_process():
            return vllm.LLM(str(self._base), **(usual | self._settings | room))

    def close(self) -> None:
        """Stop vLLM, and remove the folder of the adapters."""
        lora, self._lora = self._lora, None
        if lora is not None:
            lora.close()
            lora.llm.llm_engine.engine_core.shutdown()
