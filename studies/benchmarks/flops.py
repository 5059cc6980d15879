"""The floor of a benchmark row: the matrix products that it requires, in FLOPs.

A product of ``[n, i]`` with ``[i, j]`` is ``2 n i j``. With ``n = b s`` tokens, one Linear ``d_in -> d_out`` and rank ``r``:

    frozen            forward, gradient to x                    4 n d_in d_out
    svd kept          Vh, U: forward, gradient to x             4 n r (d_in + d_out)       dS takes no matrix gradient
    LoRA              A, B: forward, gradient to x, own         6 n r (d_in + d_out)
    folded            svd kept of full rank in place of the base
    attention         two products forward, four backward       12 b s^2 d                 the whole square, causal or not

Per-rollout gradients add nothing: those of ``dS`` are elementwise, and those of a matrix are the same products, one rollout at a
time. Elementwise work and the softmax are neglected on both sides of a ratio, so a measured ratio may be slightly below its floor
if the added work is all products.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder (multi-head attention, gated MLP), of a batch of rollouts, and ranks of the adapters."""

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

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """``(d_in, d_out)`` of one layer's q, k, v, o, gate, up, down."""
        return ((self.d, self.d),) * 4 + ((self.d, self.mlp),) * 2 + ((self.mlp, self.d),)

    @property
    def n(self) -> int:
        """Tokens in the batch."""
        return self.rollouts * self.tokens


MICRO = Size(layers=2, d=32, heads=2, mlp=64, vocab=64, rollouts=4, tokens=16, prompt=4, kept_rank=4, quarantine_rank=2)
"""Large enough to run every line, too small for timings."""


def products(size: Size) -> int:
    """Return the FLOPs of one product with every adapted Linear's weight."""
    return size.layers * sum(2 * size.n * d_in * d_out for d_in, d_out in size.linears)


def frozen(size: Size) -> int:
    """Return the FLOPs of forward and backward to the inputs without trained parameters: the denominator of every floor."""
    attention = size.layers * 12 * size.rollouts * size.tokens**2 * size.d
    return 2 * products(size) + attention + 4 * size.n * size.d * size.vocab


def svd(size: Size, rank: int | None) -> int:
    """Return the FLOPs that an SVD kept adapter of ``rank`` (``None``: full) adds at all Linears."""
    return size.layers * sum(4 * size.n * _rank(rank, d_in, d_out) * (d_in + d_out) for d_in, d_out in size.linears)


def lora(size: Size, rank: int) -> int:
    """Return the FLOPs that a trained LoRA of ``rank`` adds at all Linears."""
    return size.layers * sum(6 * size.n * rank * (d_in + d_out) for d_in, d_out in size.linears)


def folded(size: Size) -> int:
    """Return the FLOPs that folding the full-rank kept adapter into the base adds: its own products minus the base's."""
    return svd(size, None) - 2 * products(size)


def act_score(size: Size, rank: int) -> int:
    """Return the FLOPs of ``Vh`` times each rollout's mean activation."""
    return size.layers * sum(2 * size.rollouts * rank * d_in for d_in, _ in size.linears)


def full_score(size: Size) -> int:
    """Return the FLOPs of inner products and norms of each rollout's full-weight gradient, from its two sides (see ``Pairs``)."""
    b, s = size.rollouts, size.tokens
    norms = sum(min(s * (d_in + d_out), d_in * d_out) for d_in, d_out in size.linears)
    return products(size) + size.layers * 2 * b * s * norms


def _rank(rank: int | None, d_in: int, d_out: int) -> int:
    return min(d_in, d_out) if rank is None else rank
