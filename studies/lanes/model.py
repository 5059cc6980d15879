"""The byte-level language model: attention, MLP and gates of a block, and the lanes that connect them.

    attention   q, k normed over each head, rotary positions, q times a gain per head, causal softmax
    MLP         down(relu(up x)^2)

The two sublayers of a block are called separately, because the wiring decides what each reads and where it writes.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.lanes.config import BOS, VOCABULARY, LanesConfig, VirtualStep, Weights

Kind = Literal["matrix", "embedding", "control"]
EPS = 1e-6
ROTARY_BASE = 10_000.0
Q_GAIN = 1.5  # initial gain of the queries of each head
SOFTCAP = 30.0  # bound of the logits


def rms(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Return `x / sqrt(mean(x^2) + eps)` over the last axis, without a gain."""
    return functional.rms_norm(x, (x.shape[-1],), eps=EPS)


def rotations(length: int, d_head: int, like: Tensor) -> tuple[Float[Tensor, "s half"], Float[Tensor, "s half"]]:
    """Return the cosine and sine of every position's angles, computed in float64, with the dtype and device of `like`."""
    half = d_head // 2
    rates = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=like.device) / half)
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Float[Tensor, "b h s d"], cos: Float[Tensor, "s half"], sin: Float[Tensor, "s half"]) -> Float[Tensor, "b h s d"]:
    """Rotate the first half of the features against the second, by each position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class LaneAttention(nn.Module):
    """Causal self-attention over `heads` heads."""

    def __init__(self, config: LanesConfig):
        super().__init__()
        d = config.d_model
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.q_gain = nn.Parameter(torch.full((config.heads,), Q_GAIN))

    def forward(
        self, x: Float[Tensor, "b s d"], turns: tuple[Tensor, Tensor], bias: Float[Tensor, "heads 1 d_head"] | None = None
    ) -> Float[Tensor, "b s d"]:
        """Return attention's output. `bias`, if any, is added to the keys of every position before they are normed."""
        q, k, v = (self._by_head(linear(x)) for linear in (self.q, self.k, self.v))
        if bias is not None:
            k = k + bias
        q = rotate(rms(q), *turns) * self.q_gain[:, None, None]
        z = functional.scaled_dot_product_attention(q, rotate(rms(k), *turns), v, is_causal=True)
        return self.o(z.transpose(1, 2).flatten(2))

    def _by_head(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s d_head"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class LaneMLP(nn.Module):
    """Two matrices with a squared ReLU between them."""

    def __init__(self, config: LanesConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp * config.d_model, bias=False)
        self.down = nn.Linear(config.mlp * config.d_model, config.d_model, bias=False)

    def forward(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        return self.down(functional.relu(self.up(x)).square())


class LaneBlock(nn.Module):
    """The sublayers of one physical block, and its gates: `mix` (weights of stream and embedding in the read) and two scales."""

    def __init__(self, config: LanesConfig, layer: int):
        super().__init__()
        d = config.d_model
        self.attn, self.mlp = LaneAttention(config), LaneMLP(config)
        self.attn_scale, self.mlp_scale = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.mix = nn.Parameter(torch.stack((torch.ones(d), torch.zeros(d))))
        self.damping = 1 / math.sqrt(layer + 1)

    def mixed(self, lane: Float[Tensor, "b s d"], x0: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d"]:
        """Return the read of a lane before its norm: `m0 * lane + m1 * x0`."""
        return self.mix[0] * lane + self.mix[1] * x0


Lanes = list[Tensor]
EMBED_STD = 0.02
BIASED_HEAD = 2  # the head whose keys changed in the record


class StepHooks(nn.Module):
    """The hook points of one virtual step; points for a second lane, a skip or a pass embedding exist only if the step has them."""

    def __init__(self, step: VirtualStep, lanes: int, embeds: bool):
        super().__init__()
        points = ["hook_attn_read", "hook_mlp_read", "hook_attn_out", "hook_mlp_out"]
        points += [f"hook_lane{j}_{side}" for j in range(lanes) for side in ("pre", "post")]
        points += ["hook_loop_embed"] * (embeds and step.entry is not None) + ["hook_skip"] * (step.skip is not None)
        for point in points:
            self.add_module(point, HookPoint())

    def forward(self, point: str, x: Tensor) -> Tensor:
        """Pass `x` through the hook point `hook_<point>`."""
        return getattr(self, f"hook_{point}")(x)


class LanesModel(HookedRootModule):
    """Language model over lanes, from tokens to logits.

    `generator` draws the weights; `config.learned` decides whether the routing scalars are trained.
    """

    post: nn.Parameter
    resid: nn.Parameter

    def __init__(self, config: LanesConfig, generator: torch.Generator):
        super().__init__()
        self.config, self.wiring, self.steps_plan = config, config.lanes, config.steps
        self.embed = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(LaneBlock(config, layer) for layer in range(config.layers))
        self._add_controls()
        self.steps = nn.ModuleList(
            StepHooks(step, self.wiring.lanes if step.parallel else 1, config.loop_embeddings) for step in self.steps_plan
        )
        self.hook_embed, self.hook_final, self.hook_normed, self.hook_logits = (HookPoint() for _ in range(4))
        self._draw(generator)
        self.setup()

    @property
    def schedule(self) -> tuple[int, ...]:
        """The physical block of every virtual step."""
        return tuple(step.block for step in self.steps_plan)

    def forward(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s v"]:
        """Return the logits of the token after each position."""
        x0 = self.hook_embed(rms(self.embed(tokens)))
        turns = rotations(tokens.shape[1], self.config.d_head, x0)
        lanes, saved = [x0], {}
        kept = {step.source for step in self.steps_plan}
        for k in range(len(self.steps_plan)):
            lanes = self._step(k, lanes, saved, x0, turns)
            if k in kept:
                saved[k] = lanes[0]
        return self._logits(lanes)

    def loss(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
        """Return the mean nats per byte of `tokens[:, 1:]`; see `byte_loss`."""
        return byte_loss(self(tokens[:, :-1]), tokens)

    def _step(self, k: int, lanes: Lanes, saved: dict[int, Tensor], x0: Tensor, turns: tuple[Tensor, Tensor]) -> Lanes:
        step, hooks, block = self.steps_plan[k], self.steps[k], self.blocks[self.steps_plan[k].block]
        assert isinstance(hooks, StepHooks)
        assert isinstance(block, LaneBlock)

        def attn(lanes: Lanes, weights: Weights) -> Tensor:
            read = hooks("attn_read", self._read(block, lanes, x0, weights))
            return hooks("attn_out", block.attn_scale * block.attn(read, turns, self._bias(step)))

        def mlp(lanes: Lanes, weights: Weights) -> Tensor:
            return hooks("mlp_out", block.mlp_scale * block.mlp(hooks("mlp_read", self._read(block, lanes, x0, weights))))

        lanes = self._enter(step, hooks, lanes, saved)
        if step.parallel and self.wiring.mlp_reads == "before":
            lanes = self._write(step.block, lanes, attn(lanes, self.wiring.attn), mlp(lanes, self.wiring.mlp))
        else:
            x = lanes[0] + attn(lanes, (1.0,))
            lanes = [x + mlp([x], (1.0,))]
        return [hooks(f"lane{j}_post", lane) for j, lane in enumerate(lanes)]

    def _enter(self, step: VirtualStep, hooks: StepHooks, lanes: Lanes, saved: dict[int, Tensor]) -> Lanes:
        """Return the lanes after the fork, the skip connection and the pass embedding of a step."""
        lanes = lanes * self.wiring.lanes if step.parallel and len(lanes) < self.wiring.lanes else lanes
        if step.skip is not None and step.source is not None:
            skip = hooks("skip", self.skip_weight[step.skip] * saved[step.source])
            into = lanes if self.wiring.skips == "every lane" else lanes[:1]
            lanes = [torch.lerp(skip, lane, self.skip_gate[step.skip].sigmoid()) for lane in into] + lanes[len(into) :]
        if step.entry is not None and self.config.loop_embeddings:
            lanes = [lanes[0] + hooks("loop_embed", self.loop_embed[step.entry])]
        return [hooks(f"lane{j}_pre", lane) for j, lane in enumerate(lanes)]

    def _read(self, block: LaneBlock, lanes: Lanes, x0: Tensor, weights: Weights) -> Float[Tensor, "b s d"]:
        """Return the input of a sublayer: the normed mixture of lanes and embedding, damped by depth."""
        if self.wiring.norm == "of each lane" and len(lanes) > 1:
            return block.damping * weighted([rms(block.mixed(lane, x0)) for lane in lanes], weights)
        return block.damping * rms(block.mixed(weighted(lanes, weights), x0))

    def _bias(self, step: VirtualStep) -> Float[Tensor, "heads 1 d_head"] | None:
        """Return the bias of this pass on the keys of one head; None if there is none."""
        if not self.config.head_bias or step.entry is None:
            return None
        bias = self.head_bias[step.entry]
        head = torch.tensor(BIASED_HEAD % self.config.heads, device=bias.device)
        return functional.one_hot(head, self.config.heads).to(bias.dtype)[:, None, None] * bias

    def _write(self, layer: int, lanes: Lanes, a: Tensor, m: Tensor) -> Lanes:
        """Write both sublayers into the lanes by the routing scalars. A single lane has none: the outputs are added."""
        if len(lanes) == 1:
            return [lanes[0] + a + m]
        post, (ar, mr) = self.post[layer], self.resid[layer]
        if self.wiring.writes == "at once":
            return [
                keep * lane + post[0, j] * a + post[1, j] * m for j, (keep, lane) in enumerate(zip((ar, mr), lanes, strict=True))
            ]
        return [mr * (ar * lane + post[0, j] * a) + post[1, j] * m for j, lane in enumerate(lanes)]

    def _logits(self, lanes: Lanes) -> Float[Tensor, "b s v"]:
        if self.wiring.norm == "of each lane" and len(lanes) > 1:
            normed = self.hook_normed(self.hook_final(weighted([rms(lane) for lane in lanes], self.wiring.out)))
        else:
            final = weighted(lanes, self.wiring.out) if len(lanes) > 1 else lanes[0]
            normed = self.hook_normed(rms(self.hook_final(final)))
        return self.hook_logits(SOFTCAP * torch.tanh(functional.linear(normed, self.embed.weight) / SOFTCAP))

    def _add_controls(self) -> None:
        """Create all parameters that are not matrices of a block: routing scalars, skips, pass embeddings and head biases."""
        config, d = self.config, self.config.d_model
        if self.wiring.lanes > 1:
            start = torch.tensor((config.routing.attn, config.routing.mlp))
            self.post = nn.Parameter(start.expand(config.layers, 2, 2).clone(), requires_grad=config.learned)
            self.resid = nn.Parameter(torch.full((config.layers, 2), config.routing.keep), requires_grad=config.learned)
        skips = sum(step.skip is not None for step in self.steps_plan)
        if skips:
            self.skip_weight, self.skip_gate = nn.Parameter(torch.ones(skips, d)), nn.Parameter(torch.zeros(skips, d))
        if config.loop is not None and config.loop_embeddings:
            self.loop_embed = nn.Parameter(torch.zeros(config.loop.passes, d))
        if config.loop is not None and config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.loop.passes, config.d_head))

    def _draw(self, generator: torch.Generator) -> None:
        """Draw normal matrices of variance 1 / d_in; output projections are 0 if `config.zero_init`."""
        nn.init.normal_(self.embed.weight, std=EMBED_STD, generator=generator)
        for block in self.blocks:
            for name, linear in block.named_modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=linear.in_features**-0.5, generator=generator)
                    if self.config.zero_init and name in ("attn.o", "mlp.down"):
                        nn.init.zeros_(linear.weight)


def byte_loss(logits: Float[Tensor, "b n v"], tokens: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
    """Return the mean nats per byte of `tokens[:, 1:]`, each given those before it; starts of documents are not predicted."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=BOS)


def weighted(lanes: Lanes, weights: Weights) -> Float[Tensor, "b s d"]:
    """Return the weighted sum of the lanes. A lane of weight 0 is not read at all, one of weight 1 is used unscaled."""
    read = [lane if weight == 1 else weight * lane for lane, weight in zip(lanes, weights, strict=True) if weight]
    return sum(read[1:], start=read[0])


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of every parameter: the weight of a Linear, of an Embedding, or a control, which is everything else."""
    coded: dict[str, Kind] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            coded[f"{name}.weight"] = "matrix" if isinstance(module, nn.Linear) else "embedding"
    return {name: coded.get(name, "control") for name, _ in model.named_parameters()}
