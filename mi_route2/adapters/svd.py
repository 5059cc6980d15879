"""The SVD coordinates of a frozen weight, ``W = U diag(S) Vh``, cached on disk by a hash of the weight.

Singular vectors are defined up to a joint sign. Here the largest entry of each row of ``Vh`` is positive, so that directions
fitted in these coordinates mean the same on every machine.

A few leading coordinates of a large weight need no full SVD: a Gaussian sketch of its range, sharpened by subspace iteration,
finds them in a few products with ``W`` (Halko, Martinsson and Tropp, SIAM Review 53, 2011: algorithms 4.4 and 5.1). With ``Q`` an
orthonormal basis of that range and ``Q^T W = A S Vh``, the factors are ``U = Q A``, ``S``, ``Vh``, cut to the leading ``r``. So
``W^T u_i = s_i v_i`` holds exactly, and what is left on the other side is the error:

    R = W V - U S        residual_i = |R_i|        error = |R|_F / |S|_F
"""

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from mi_route2.adapters.gradients import wide
from mi_route2.files import write_whole

TOLERANCE = 0.01  # the ``error`` above which ``decompose`` warns

# Under 1024 LAPACK takes a second or so; above, a sketch costs less, even of an eighth of the full rank (0.7 of the time at 2048).
_EXACT_BELOW, _SHARE = 1024, 8
# On slowly falling spectra, as of trained weights, the usual 2 iterations and 10 columns more leave errors of 5 to 15 %. With 8
# iterations and twice the columns, spectra i^-1/2 and i^-1/4 come to 0.02 % and 0.5 % at rank 64 of 1024, pure noise to 3 %.
_ITERATIONS, _OVERSAMPLING = 8, 16

_PATIENCE, _TICK = 3.0, 0.5  # seconds before a bar shows, and between its updates
_LONG = 2**28  # d_out * d_in * min(d_out, d_in) from which a bar is kept ready


@dataclass(frozen=True)
class SVD:
    """``U [d_out r]``, ``S [r]``, ``Vh [r d_in]``; ``r`` the rank that is kept, largest singular values first.

    ``residual [r]``, in the units of ``S``, is ``|W v_i - s_i u_i|`` of a randomised SVD (``None`` where LAPACK computed it all).
    Its factors are exact singular triplets of ``W - R Vh``: a singular value of ``W`` lies within ``residual_i`` of each ``s_i``.
    """

    U: Float[Tensor, "d_out r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r d_in"]
    residual: Float[Tensor, " r"] | None = None

    @property
    def error(self) -> float:
        """``|W V - U S|_F / |S|_F``; 0 where LAPACK computed all of it.

        With ``s*`` the true leading ``r`` singular values, ``sqrt(1 + error^2) <= |s*| / |S| <= 1 + error``. The lower bound always
        holds, the upper one (Ky Fan's inequality for ``W - R Vh``) where the sketch missed no leading direction. Single vectors
        turn by more where neighbouring singular values are close; there ``W`` itself hardly tells them apart.
        """
        if self.residual is None:
            return 0.0
        missed, kept = self.residual.double().norm().item(), self.S.double().norm().item()
        return missed / kept if kept else 0.0

    def top(self, rank: int | None) -> "SVD":
        """The leading ``rank`` coordinates (all for ``None``)."""
        if rank is None:
            return self
        _refuse_rank(rank, self.S.numel())
        residual = None if self.residual is None else self.residual[:rank].clone()
        # Copies: leading rows are contiguous as they are, and a view of them would keep the whole matrix alive.
        return SVD(self.U[:, :rank].contiguous(), self.S[:rank].clone(), self.Vh[:rank].clone(), residual)

    def to(self, device: torch.device) -> "SVD":
        """The same on ``device``."""
        residual = None if self.residual is None else self.residual.to(device)
        return SVD(self.U.to(device), self.S.to(device), self.Vh.to(device), residual)


def _refuse_rank(rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise ValueError(f"rank {rank} is outside 1..{most} of this weight")


def _update(digest: "hashlib._Hash", t: Tensor) -> None:
    digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
    digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)  # a view: weights are large


def weight_hash(weight: Tensor) -> str:
    """SHA-256 of a weight's shape, type and bytes."""
    digest = hashlib.sha256()
    _update(digest, weight)
    return digest.hexdigest()


def _seal(key: str, tensors: dict[str, Tensor]) -> str:
    """Binds the factors to the weight that they belong to: one changed byte would be a wrong direction everywhere."""
    digest = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        _update(digest, tensors[name])
    return digest.hexdigest()


def _cached(path: Path, key: str) -> SVD | None:
    """What the file holds, or ``None`` where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            # copies: what safetensors gives is mapped, and changes with the file after it was checked
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
            sealed = (handle.metadata() or {}).get("seal") == _seal(key, tensors)
    except (FileNotFoundError, SafetensorError):
        return None
    return SVD(**tensors) if sealed else None


def _keep(path: Path, key: str, svd: SVD) -> None:
    tensors = {name: t.cpu() for name, t in vars(svd).items() if t is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(tensors, metadata={"seal": _seal(key, tensors)}))


def decompose(weight: Float[Tensor, "d_out d_in"], cache_dir: Path | None = None, *, rank: int | None = None) -> SVD:
    """The thin SVD of ``weight`` in at least float32, cut to ``rank`` (``None``: all of it), from ``cache_dir`` where it was kept.

    LAPACK computes all of it, unless the weight has 1024 rows and columns or more and ``rank`` is at most an eighth of them: then
    it is ``randomised_svd``, seeded by the weight's hash, so that every machine draws the same. That result carries its ``error``
    and ``residual``; above ``TOLERANCE`` a ``UserWarning`` says so. A full SVD in the cache serves any rank.

    On a terminal, whatever takes over three seconds shows a bar. A cache file that cannot be read or was changed is computed anew
    and replaced. ``ValueError``: a rank outside the weight.
    """
    d_out, d_in = weight.shape
    if rank is not None:
        _refuse_rank(rank, min(d_out, d_in))
    svd = _whole_or_leading(weight, cache_dir, rank)
    if svd.error > TOLERANCE:
        warnings.warn(
            f"the leading {rank} singular vectors of a {d_out}x{d_in} weight are known up to an error of {svd.error:.1%}, over "
            f"{TOLERANCE:.0%}: its spectrum is flat there; decompose(weight, cache_dir) keeps the full SVD, which serves any rank",
            stacklevel=2,
        )
    return svd.to(weight.device).top(rank)


def _whole_or_leading(weight: Tensor, cache_dir: Path | None, rank: int | None) -> SVD:
    leading = rank if rank is not None and min(weight.shape) >= max(_EXACT_BELOW, _SHARE * rank) else None
    if cache_dir is None:
        return _exact_svd(weight) if leading is None else _seeded_svd(weight, leading, weight_hash(weight))
    key = weight_hash(weight)
    path = cache_dir / f"svd-{key[:32]}.safetensors"
    svd = _cached(path, key)
    if svd is not None:
        return svd
    if leading is None:
        svd = _exact_svd(weight)
        _keep(path, key, svd)
        return svd
    path = cache_dir / f"svd-{key[:32]}-rank{leading}.safetensors"
    made = f"{key} rank {leading} oversampling {_OVERSAMPLING} iterations {_ITERATIONS}"  # other settings: another result
    svd = _cached(path, made)
    if svd is None:
        svd = _seeded_svd(weight, leading, key)
        _keep(path, made, svd)
    return svd


def _seeded_svd(weight: Tensor, rank: int, key: str) -> SVD:
    generator = torch.Generator().manual_seed(int(key[:15], 16))  # 60 bits: seeds are signed
    return randomised_svd(weight, rank, generator, oversampling=_OVERSAMPLING, iterations=_ITERATIONS)


def randomised_svd(
    weight: Float[Tensor, "d_out d_in"],
    rank: int,
    generator: torch.Generator,
    *,
    oversampling: int = _OVERSAMPLING,
    iterations: int = _ITERATIONS,
) -> SVD:
    """The leading ``rank`` coordinates of ``weight`` from a Gaussian sketch of ``rank + max(rank, oversampling)`` columns.

    Costs ``2 iterations + 3`` products with the weight, and memory for a few matrices of the sketch's size. ``generator`` draws the
    sketch. ``ValueError``: a rank outside the weight.
    """
    W = weight.detach().to(wide(weight.dtype)).contiguous()  # another layout would round otherwise, under the same hash
    _refuse_rank(rank, min(W.shape))
    columns = min(rank + max(rank, oversampling), *W.shape)
    draw = torch.randn(W.shape[1], columns, generator=generator, dtype=W.dtype, device=generator.device).to(W.device)
    with _progress(W, f", rank {rank}", 2 * iterations + 3) as done:
        Q = torch.linalg.qr(W @ draw).Q
        done()
        for _ in range(iterations):  # orthonormal after every product: a plain power would leave only the first direction
            Q = torch.linalg.qr((Q.mT @ W).mT).Q  # W^T Q, which some BLAS kernels take up to 50 times as long for as for Q^T W
            done()
            Q = torch.linalg.qr(W @ Q).Q
            done()
        A, S, Vh = torch.linalg.svd(Q.mT @ W, full_matrices=False)
        done()
        svd = _signed(Q @ A, S, Vh).top(rank)
        residual = torch.linalg.vector_norm(W @ svd.Vh.mT - svd.U * svd.S, dim=0)
        done()
    return SVD(svd.U, svd.S, svd.Vh, residual)


def _exact_svd(weight: Tensor) -> SVD:
    W = weight.detach().to(wide(weight.dtype))
    with _progress(W, "", None):
        return _signed(*torch.linalg.svd(W, full_matrices=False))


def _signed(U: Tensor, S: Tensor, Vh: Tensor) -> SVD:
    peak = Vh.abs().argmax(dim=1, keepdim=True)
    sign = torch.where(Vh.gather(1, peak) < 0, -1.0, 1.0).to(Vh.dtype)
    return SVD((U * sign.mT).contiguous(), S.contiguous(), (Vh * sign).contiguous())


@contextmanager
def _progress(W: Tensor, what: str, stages: int | None) -> Iterator[Callable[[], None]]:
    """Context: a bar for the SVD of ``W``; what it yields is to be called after each of ``stages``.

    Without stages it shows the time that has passed and no share: the work is one LAPACK call, which cannot say how far it is.
    That call releases the interpreter's lock, so a thread keeps the bar alive, and nobody but this thread writes it.
    """
    if W.numel() * min(W.shape) < _LONG:
        yield lambda: None
        return
    finished: list[None] = []
    ended = threading.Event()
    shape = "{desc}: {elapsed}" if stages is None else None
    bar = tqdm(
        desc=f"SVD of {W.shape[0]}x{W.shape[1]}{what}",
        total=stages,
        unit="product",
        delay=_PATIENCE,
        mininterval=0,
        miniters=0,
        leave=False,
        disable=None,
        bar_format=shape,
    )

    def tick() -> None:
        while not ended.wait(_TICK):
            bar.update(len(finished) - bar.n)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        yield lambda: finished.append(None)
    finally:
        ended.set()
        clock.join()
        bar.close()
