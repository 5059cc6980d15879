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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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


def _update(digest: "hashlib._Hash", t: Tensor) -> None:
    digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
    digest.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def weight_hash(weight: Tensor) -> str:
    """SHA-256 of a weight's shape, type and bytes."""
    digest = hashlib.sha256()
    _update(digest, weight)
    return digest.hexdigest()


def _seal(key: str, tensors: dict[str, Tensor]) -> str:
    """Binds the three factors to the weight that they belong to: one changed byte would be a wrong direction everywhere."""
    digest = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        _update(digest, tensors[name])
    return digest.hexdigest()


def _cached(path: Path, key: str) -> dict[str, Tensor] | None:
    """What the file holds, or ``None`` where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            sealed = (handle.metadata() or {}).get("seal") == _seal(key, tensors)
    except (FileNotFoundError, SafetensorError):
        return None
    return tensors if sealed else None


def decompose(weight: Float[Tensor, "d_out d_in"], cache_dir: Path | None = None) -> SVD:
    """The full thin SVD of ``weight`` in at least float32, from ``cache_dir`` where it was kept before.

    A cache file that cannot be read or was changed is computed anew and replaced.
    """
    if cache_dir is None:
        return _signed_svd(weight)
    key = weight_hash(weight)
    path = cache_dir / f"svd-{key[:32]}.safetensors"
    tensors = _cached(path, key)
    if tensors is None:
        svd = _signed_svd(weight)
        tensors = {"U": svd.U.cpu(), "S": svd.S.cpu(), "Vh": svd.Vh.cpu()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, partial, metadata={"seal": _seal(key, tensors)})
        partial.replace(path)
    return SVD(**{name: t.to(weight.device) for name, t in tensors.items()})


def _signed_svd(weight: Tensor) -> SVD:
    U, S, Vh = torch.linalg.svd(weight.detach().to(wide(weight.dtype)), full_matrices=False)
    peak = Vh.abs().argmax(dim=1, keepdim=True)
    sign = torch.where(Vh.gather(1, peak) < 0, -1.0, 1.0).to(Vh.dtype)
    return SVD((U * sign.mT).contiguous(), S.contiguous(), (Vh * sign).contiguous())
