"""SVD coordinates of a frozen weight, ``W = U diag(S) Vh``, cached on disk by a hash of the weight.

Singular vectors are defined up to a joint sign. Here the largest entry of each row of ``Vh`` is positive, so that directions fitted
in these coordinates have the same meaning on every machine.

The few leading coordinates of a large weight need no full SVD: a Gaussian sketch of its range, sharpened by subspace iteration,
finds them in a few products with ``W`` (Halko, Martinsson and Tropp, SIAM Review 53, 2011: algorithms 4.4 and 5.1). With ``Q`` an
orthonormal basis of that range and ``Q^T W = A S Vh``, the factors are ``U = Q A``, ``S``, ``Vh``, cut to the leading ``r``. Then
``W^T u_i = s_i v_i`` holds exactly, and the error is the residual of the other equation:

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

from mi_route2.adapters.gradients import exact, wide
from mi_route2.files import write_whole

TOLERANCE = 0.01  # ``decompose`` warns above this ``error``

# Below 1024 LAPACK takes about a second; above, a sketch is faster, even at an eighth of the full rank (0.7 of the time at 2048).
_EXACT_BELOW, _SHARE = 1024, 8
# On slowly decaying spectra, such as those of trained weights, the usual 2 iterations and 10 extra columns leave errors of
# 5 to 15 %. With 8 iterations and twice the columns, the errors at rank 64 of 1024 are 0.02 % and 0.5 % for spectra i^-1/2
# and i^-1/4, and 3 % for pure noise.
_ITERATIONS, _OVERSAMPLING = 8, 16

_PATIENCE, _TICK = 3.0, 0.5  # seconds before a bar shows, and between its updates
_LONG = 2**28  # d_out * d_in * min(d_out, d_in) from which a progress bar is prepared


@dataclass(frozen=True)
class SVD:
    """Thin or truncated SVD, largest singular values first.

    Attributes:
        U: ``[d_out r]``.
        S: ``[r]``.
        Vh: ``[r d_in]``.
        residual: ``[r]``, ``|W v_i - s_i u_i|`` in the units of ``S`` for a randomized SVD; ``None`` if LAPACK computed the full
            SVD. The factors are exact singular triplets of ``W - R Vh``: ``W`` has a singular value within ``residual_i`` of each
            ``s_i``.
    """

    U: Float[Tensor, "d_out r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r d_in"]
    residual: Float[Tensor, " r"] | None = None

    @property
    def error(self) -> float:
        """Relative error ``|W V - U S|_F / |S|_F``; 0 for a full SVD from LAPACK.

        With ``s*`` the true leading ``r`` singular values, ``sqrt(1 + error^2) <= |s*| / |S| <= 1 + error``. The lower bound always
        holds; the upper one (Ky Fan's inequality for ``W - R Vh``) holds if the sketch missed no leading direction. Single vectors
        have larger errors if neighboring singular values are close, because ``W`` itself hardly determines them.
        """
        if self.residual is None:
            return 0.0
        missed, kept = self.residual.double().norm().item(), self.S.double().norm().item()
        return missed / kept if kept else 0.0

    def top(self, rank: int | None) -> "SVD":
        """Return the leading ``rank`` coordinates (``None``: all)."""
        if rank is None:
            return self
        _refuse_rank(rank, self.S.numel())
        residual = None if self.residual is None else self.residual[:rank].clone()
        # Copies, because leading rows are already contiguous, and a view of them would keep the whole matrix alive.
        return SVD(self.U[:, :rank].contiguous(), self.S[:rank].clone(), self.Vh[:rank].clone(), residual)

    def to(self, device: torch.device) -> "SVD":
        """Return a copy on ``device``."""
        residual = None if self.residual is None else self.residual.to(device)
        return SVD(self.U.to(device), self.S.to(device), self.Vh.to(device), residual)


def _refuse_rank(rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise ValueError(f"rank {rank} is outside 1..{most} of this weight")


def _update(digest: "hashlib._Hash", t: Tensor) -> None:
    digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
    digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)  # a view: weights are large


def weight_hash(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's shape, type and bytes."""
    digest = hashlib.sha256()
    _update(digest, weight)
    return digest.hexdigest()


def _seal(key: str, tensors: dict[str, Tensor]) -> str:
    """Return a hash that binds the factors to their weight, so that a change of either is detected."""
    digest = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        _update(digest, tensors[name])
    return digest.hexdigest()


def _cached(path: Path, key: str) -> SVD | None:
    """Return the SVD in a cache file; ``None`` if the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            # copies, because safetensors maps the file into memory, and it may change after the check
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
            sealed = (handle.metadata() or {}).get("seal") == _seal(key, tensors)
    except (FileNotFoundError, SafetensorError):
        return None
    return SVD(**tensors) if sealed else None


def _keep(path: Path, key: str, svd: SVD) -> None:
    tensors = {name: t.cpu() for name, t in vars(svd).items() if t is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(tensors, metadata={"seal": _seal(key, tensors)}))


@exact()  # a cache would keep what autocast rounds
def decompose(weight: Float[Tensor, "d_out d_in"], cache_dir: Path | None = None, *, rank: int | None = None) -> SVD:
    """Return the thin SVD of ``weight`` in at least float32, cut to ``rank``; read from ``cache_dir`` if it is cached there.

    LAPACK computes the full SVD, unless the weight has at least 1024 rows and columns and ``rank`` is at most an eighth of them.
    Then ``randomized_svd`` computes it, seeded by the weight's hash so that every machine draws the same sketch, with an ``error``
    and ``residual``; a ``UserWarning`` says if the error is above ``TOLERANCE``. A full SVD in the cache serves any rank. A cache
    file that is damaged or was changed is computed again and replaced. On a terminal, a progress bar appears after three seconds.

    Args:
        weight: The weight.
        cache_dir: Folder that caches SVDs; ``None`` for no cache.
        rank: Number of leading coordinates; ``None`` for all.

    Raises:
        ValueError: The rank is not between 1 and the full rank, or the weight holds NaN or infinity.
    """
    d_out, d_in = weight.shape
    if rank is not None:
        _refuse_rank(rank, min(d_out, d_in))
    if not torch.isfinite(weight).all():  # LAPACK returns NaN for infinity, which a cache would keep
        raise ValueError(f"a weight of {d_out}x{d_in} holds NaN or infinity, so it has no SVD: load the base model again")
    svd = _whole_or_leading(weight, cache_dir, rank)
    if svd.error > TOLERANCE:
        warnings.warn(
            f"the leading {rank} singular vectors of a {d_out}x{d_in} weight have an error of {svd.error:.1%}, over "
            f"{TOLERANCE:.0%}: its spectrum is flat there; decompose(weight, cache_dir) caches the full SVD, which serves any rank",
            stacklevel=2,
        )
    return svd.to(weight.device).top(rank)


def _whole_or_leading(weight: Tensor, cache_dir: Path | None, rank: int | None) -> SVD:
    leading = rank if rank is not None and min(weight.shape) >= max(_EXACT_BELOW, _SHARE * rank) else None
    if cache_dir is None:
        return _exact_svd(weight) if leading is None else _seeded_svd(weight, leading, weight_hash(weight))
    key = made = weight_hash(weight)
    path = cache_dir / f"svd-{key[:32]}.safetensors"
    svd = _cached(path, made)
    if svd is None and leading is not None:
        path = cache_dir / f"svd-{key[:32]}-rank{leading}.safetensors"
        made = f"{key} rank {leading} oversampling {_OVERSAMPLING} iterations {_ITERATIONS}"  # the result depends on all of these
        svd = _cached(path, made)
    if svd is None:
        svd = _exact_svd(weight) if leading is None else _seeded_svd(weight, leading, key)
        _keep(path, made, svd)
    return svd


def _seeded_svd(weight: Tensor, rank: int, key: str) -> SVD:
    generator = torch.Generator().manual_seed(int(key[:15], 16))  # 60 bits: seeds are signed
    return randomized_svd(weight, rank, generator, oversampling=_OVERSAMPLING, iterations=_ITERATIONS)


def randomized_svd(
    weight: Float[Tensor, "d_out d_in"],
    rank: int,
    generator: torch.Generator,
    *,
    oversampling: int = _OVERSAMPLING,
    iterations: int = _ITERATIONS,
) -> SVD:
    """Return the leading ``rank`` coordinates of ``weight`` from a Gaussian sketch of ``rank + max(rank, oversampling)`` columns.

    Costs ``2 iterations + 3`` products with the weight, and memory for a few matrices of the sketch's size.

    Args:
        weight: The weight.
        rank: Number of coordinates.
        generator: Draws the sketch.
        oversampling: Minimum number of extra columns.
        iterations: Number of subspace iterations.

    Raises:
        ValueError: The rank is not between 1 and the full rank.
    """
    W = weight.detach().to(wide(weight.dtype)).contiguous()  # another memory layout rounds differently, under the same hash
    _refuse_rank(rank, min(W.shape))
    columns = min(rank + max(rank, oversampling), *W.shape)
    draw = torch.randn(W.shape[1], columns, generator=generator, dtype=W.dtype, device=generator.device).to(W.device)
    with _progress(W, f", rank {rank}", 2 * iterations + 3) as done:
        Q = torch.linalg.qr(W @ draw).Q
        done()
        for _ in range(iterations):  # orthonormalize after every product, or all columns would turn to the first direction
            Q = torch.linalg.qr((Q.mT @ W).mT).Q  # some BLAS kernels are up to 50 times as fast for Q^T W as for W^T Q
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
    """Context: show a progress bar for the SVD of ``W``; call the yielded function after each of ``stages``.

    Without stages the bar shows only the elapsed time, because the SVD is a single LAPACK call. That call releases the
    interpreter's lock, so a thread can update the bar; no other thread writes to it.
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
