"""Data parallelism: one explicit sum of adapter gradients, outside any reducer.

A pooled flag is final only after the whole backward, so the gradient is summed once then: ``step.finish(reduce=sum_over_ranks)``.
Give the loss the global batch's denominator, and the sum equals the single-process gradient.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def sum_over_ranks(parameters: Sequence[nn.Parameter]) -> None:
    """All-reduce (sum) the gradients in one flat buffer; a missing gradient counts as 0, so that every rank takes part."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sum_over_ranks needs an initialised process group (torch.distributed.init_process_group)")
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for p, piece in zip(parameters, flat.split([g.numel() for g in grads])):
        p.grad = piece.view_as(p).clone()
