"""The floor of a benchmark row: the matrix products that it requires, in FLOPs.

A product of ``[n, i]`` with ``[i, j]`` is ``2 n i j``. With ``n = b s`` tokens, one Linear ``d_in -> d_out`` and rank ``r``:

    frozen            forward, gradient to x                    4 n d_in d_out
    svd kept          Vh, U: forward, gradient to x             4 n r (d_in + d_out)       dS takes no matrix gradient
    LoRA              A, B: forward, gradient to x, own         6 n r (d_in + d_out)
    folded            svd kept of full rank in place of the base
    attention         two products forward, four backward       12 b s^2 d                 the whole square, causal or not

Per-rollout gradients of ``dS`` add nothing: they are elementwise. Those of a matrix are the same products one rollout at a time,
and sums over rollouts come on top, which ``gates`` counts and the floor does not. Elementwise work and the softmax are neglected on
both sides of a ratio, so a measured ratio may be slightly below its floor if the added work is all products.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder (attention, gated MLP), of a batch of rollouts, and ranks of the adapters.

    ``kv`` is the width of keys and values (``None``: ``d``), ``mlp`` that of the MLPs that a token passes. ``attention_only``: the
    MLP has no adapters.
    """

    layers: int = 6
    d: int = 512
    heads: int = 8
    mlp: int = 2048
    vocab: int = 1024
    rollouts: int = 8
    tokens: int = 128
    prompt: int = 32
    kept_rank: int = 64
    quarantine_rank: int = 16
    kv: int | None = None
    attention_only: bool = False

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """``(d_in, d_out)`` of one layer's q, k, v, o, gate, up, down."""
        kv = self.d if self.kv is None else self.kv
        attention = ((self.d, self.d), (self.d, kv), (self.d, kv), (self.d, self.d))
        return (*attention, (self.d, self.mlp), (self.d, self.mlp), (self.mlp, self.d))

    @property
    def adapted(self) -> tuple[tuple[int, int], ...]:
        """``(d_in, d_out)`` of one layer's Linears with adapters."""
        return self.linears[:4] if self.attention_only else self.linears

    @property
    def n(self) -> int:
        """Tokens in the batch."""
        return self.rollouts * self.tokens


MICRO = Size(layers=2, d=32, heads=2, mlp=64, vocab=64, rollouts=4, tokens=16, prompt=4, kept_rank=4, quarantine_rank=2)
"""Large enough to run every line, too small for timings."""


def products(size: Size, linears: Sequence[tuple[int, int]] | None = None) -> int:
    """Return the FLOPs of one product with the weight of every Linear, or of those given of each layer."""
    return size.layers * sum(2 * size.n * d_in * d_out for d_in, d_out in (size.linears if linears is None else linears))


def frozen(size: Size) -> int:
    """Return the FLOPs of forward and backward to the inputs without trained parameters: the denominator of every floor."""
    attention = size.layers * 12 * size.rollouts * size.tokens**2 * size.d
    return 2 * products(size) + attention + 4 * size.n * size.d * size.vocab


def svd(size: Size, rank: int | None) -> int:
    """Return the FLOPs that an SVD kept adapter of ``rank`` (``None``: full) adds at all Linears."""
    return size.layers * sum(4 * size.n * _rank(rank, d_in, d_out) * (d_in + d_out) for d_in, d_out in size.adapted)


def lora(size: Size, rank: int) -> int:
    """Return the FLOPs that a trained LoRA of ``rank`` adds at all Linears."""
    return size.layers * sum(6 * size.n * rank * (d_in + d_out) for d_in, d_out in size.adapted)


def folded(size: Size) -> int:
    """Return the FLOPs that folding the full-rank kept adapter into the base adds: its own products minus the base's."""
    return svd(size, None) - 2 * products(size)


def act_score(size: Size, rank: int) -> int:
    """Return the FLOPs of ``Vh`` times each rollout's mean activation."""
    return size.layers * sum(2 * size.rollouts * rank * d_in for d_in, _ in size.adapted)


def full_score(size: Size) -> int:
    """Return the FLOPs of inner products and norms of each rollout's full-weight gradient, from its two sides (see ``Pairs``)."""
    b, s = size.rollouts, size.tokens
    norms = sum(min(s * (d_in + d_out), d_in * d_out) for d_in, d_out in size.adapted)
    return products(size, size.adapted) + size.layers * 2 * b * s * norms


def _rank(rank: int | None, d_in: int, d_out: int) -> int:
    return min(d_in, d_out) if rank is None else rank


def deployed_pass(size: Size) -> int:
    """Return the FLOPs of a forward and backward of the deployed model in which no factor takes a gradient: a scoring pass."""
    return frozen(size) + svd(size, size.kept_rank)


def gates(size: Size, kept: str, score: str, decided_at: str) -> int:
    """Return the FLOPs that a mask route adds to a training pass where it takes the gradients of the kept factors per rollout.

    A gradient that waits for its flag, or is scored, is held as the smaller of ``G_b`` and its two sides (see ``compact``).
    """
    b, r = size.rollouts, size.kept_rank
    if kept == "svd":
        return size.layers * len(size.adapted) * 2 * b * r
    waits, scored, total = decided_at == "finish", score == "grad", 0
    for d_in, d_out in size.adapted:
        if waits and not as_pair(size, r, d_in):
            total += 2 * b * r * d_in
        if scored and decided_at in ("backward", "finish"):
            total += compare_b(size, d_out)
        if (scored or waits) and not as_pair(size, r, d_out):
            total += 2 * b * r * d_out
    return size.layers * total


def compare_b(size: Size, d_out: int) -> int:
    """Return the FLOPs by which the gradient of a factor ``B`` is compared with a direction, beyond those that give ``G_b``."""
    n, s, r = size.n, size.tokens, size.kept_rank
    if not as_pair(size, r, d_out):
        return 0
    return 2 * n * (r * d_out + min(s * (r + d_out), r * d_out))


def grad_score(size: Size, kept: str) -> int:
    """Return the FLOPs of the ``grad`` features in a scoring pass and of their comparison."""
    if kept == "svd":
        return 0
    products_a = (0 if as_pair(size, size.kept_rank, d_out) else 2 * size.n * size.kept_rank * d_out for _, d_out in size.adapted)
    return size.layers * sum(map(sum, zip(products_a, (compare_b(size, d_out) for _, d_out in size.adapted))))


def as_pair(size: Size, d_in: int, d_out: int) -> bool:
    """Return True if the two sides of a factor's gradients are smaller than the gradients ``G_b``."""
    return size.rollouts * d_in * d_out >= size.n * (d_in + d_out)
