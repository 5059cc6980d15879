"""The SVD coordinates of a frozen weight, ``W = U diag(S) Vh``, cached on disk by a hash of the weight.

Singular vectors are defined up to a joint sign. Here the largest entry of each row of ``Vh`` is positive, so that directions
fitted in these coordinates mean the same on every machine.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mi_route2.adapters.gradients import wide


@dataclass(frozen=True)
class SVD:
    """``U [d_out r]``, ``S [r]``, ``Vh [r d_in]``; ``r`` the rank that is kept, largest singular values first."""

    U: Float[Tensor, "d_out r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r d_in"]

    def top(self, rank: int | None) -> "SVD":
        """The leading ``rank`` coordinates (all for ``None``)."""
        if rank is None:
            return self
        if not 1 <= rank <= self.S.numel():
            raise ValueError(f"rank {rank} is outside 1..{self.S.numel()} of this weight")
        return SVD(self.U[:, :rank].contiguous(), self.S[:rank].contiguous(), self.Vh[:rank].contiguous())


def weight_hash(weight: Tensor) -> str:
    """SHA-256 of a weight's shape, type and bytes."""
    digest = hashlib.sha256(f"{tuple(weight.shape)} {weight.dtype}".encode())
    digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def decompose(weight: Float[Tensor, "d_out d_in"], cache_dir: Path | None = None) -> SVD:
    """The full thin SVD of ``weight`` in at least float32, from ``cache_dir`` where it was kept before.

    A cache file that cannot be read is computed anew and replaced.
    """
    path = None if cache_dir is None else cache_dir / f"svd-{weight_hash(weight)[:32]}.safetensors"
    if path is not None and path.exists():
        try:
            found = load_file(path)
            return SVD(found["U"].to(weight.device), found["S"].to(weight.device), found["Vh"].to(weight.device))
        except (SafetensorError, KeyError):
            path.unlink()
    U, S, Vh = torch.linalg.svd(weight.detach().to(wide(weight.dtype)), full_matrices=False)
    peak = Vh.abs().argmax(dim=1, keepdim=True)
    sign = torch.where(Vh.gather(1, peak) < 0, -1.0, 1.0).to(Vh.dtype)
    svd = SVD((U * sign.mT).contiguous(), S.contiguous(), (Vh * sign).contiguous())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"U": svd.U.cpu(), "S": svd.S.cpu(), "Vh": svd.Vh.cpu()}, partial)
        partial.replace(path)
    return svd
