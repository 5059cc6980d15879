"""The language model of the lanes study, every lane, read and write of which is a TransformerLens hook point.

    x0 = rms(embed(t)),  l_j = x0                                           c = 1 / sqrt(layer + 1)
    A = attn_scale * Attn(c * read_attn(l))       M = mlp_scale * MLP(c * read_mlp(l))       read = rms(m0 * l + m1 * x0)
    l_j <- ar * l_j + ap[j] * A,   l_j <- mr * l_j + mp[j] * M              (behind the fork; before it one stream, all weights 1)
    logits = 30 tanh(embed . rms(out(l)) / 30)

What a wiring reads, how it writes and what it reads out is a row of `wirings.WIRINGS`; the order of blocks one of `schedule.plan`.
At initialisation the output projections are 0 (`zero_init`), so every block is the identity up to `resid` and every partial
derivative by a routing scalar that weights a sublayer is exactly 0. Source: parameter-golf, pull request 1518.

Hook points, by virtual step `k`, which runs block `model.steps_plan[k].block`:

    hook_embed                                  x0
    steps.k.hook_loop_embed, .hook_skip         what is added where a pass begins; the saved stream that is mixed in
    steps.k.hook_lane0_pre, .hook_lane1_pre     the lanes that enter (lane 0 alone before the fork)
    steps.k.hook_attn_read, .hook_mlp_read      what a sublayer is given
    steps.k.hook_attn_out, .hook_mlp_out        A and M, scaled, before they are weighted into the lanes
    steps.k.hook_lane0_post, .hook_lane1_post   the lanes that leave
    hook_final, hook_normed, hook_logits        what the wiring reads out, its norm (`z2` reads out norms: the same), the logits
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.lanes.blocks import Block, rms, rotations
from studies.lanes.config import BOS, VOCABULARY, LanesConfig
from studies.lanes.schedule import Step
from studies.lanes.wirings import Weights

Lanes = list[Tensor]
EMBED_STD = 0.02
BIASED_HEAD = 2  # the head whose keys the record found changed


class StepHooks(nn.Module):
    """The hook points of one virtual step. A step that has no second lane, skip or pass to begin has no point for it."""

    def __init__(self, step: Step, lanes: int, embeds: bool):
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
    """Tokens to logits. `generator` draws the weights; `config.learned` says whether the routing scalars are trained."""

    post: nn.Parameter
    resid: nn.Parameter

    def __init__(self, config: LanesConfig, generator: torch.Generator):
        super().__init__()
        self.config, self.wiring, self.steps_plan = config, config.lanes, config.steps
        self.embed = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self._add_controls()
        self.steps = nn.ModuleList(StepHooks(step, self._lanes_at(step), config.loop_embeddings) for step in self.steps_plan)
        self.hook_embed, self.hook_final, self.hook_normed, self.hook_logits = (HookPoint() for _ in range(4))
        self._draw(generator)
        self.setup()

    @property
    def schedule(self) -> tuple[int, ...]:
        """The physical block of every virtual step."""
        return tuple(step.block for step in self.steps_plan)

    def forward(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s v"]:
        """Logits of the token after each position."""
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
        """Mean nats per byte that `tokens[:, 1:]` holds, each given those before it; starts of documents are not predicted."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=BOS)

    def _hooks(self, k: int) -> StepHooks:
        hooks = self.steps[k]
        assert isinstance(hooks, StepHooks)
        return hooks

    def _block(self, k: int) -> Block:
        block = self.blocks[self.steps_plan[k].block]
        assert isinstance(block, Block)
        return block

    def _lanes_at(self, step: Step) -> int:
        return self.wiring.lanes if step.parallel else 1

    def _step(self, k: int, lanes: Lanes, saved: dict[int, Tensor], x0: Tensor, turns: tuple[Tensor, Tensor]) -> Lanes:
        step, hooks, block = self.steps_plan[k], self._hooks(k), self._block(k)
        lanes = self._enter(step, hooks, lanes, saved)
        if step.parallel and self.wiring.mlp_reads == "before":
            a = self._attn(step, hooks, block, self._read(block, lanes, x0, self.wiring.attn), turns)
            m = self._mlp(hooks, block, self._read(block, lanes, x0, self.wiring.mlp))
            lanes = self._write(step.block, lanes, a, m)
        else:
            x = lanes[0] + self._attn(step, hooks, block, self._read(block, lanes, x0, (1.0,)), turns)
            lanes = [x + self._mlp(hooks, block, self._read(block, [x], x0, (1.0,)))]
        return [hooks(f"lane{j}_post", lane) for j, lane in enumerate(lanes)]

    def _enter(self, step: Step, hooks: StepHooks, lanes: Lanes, saved: dict[int, Tensor]) -> Lanes:
        """The lanes with what is mixed into them first: the fork, a skip, the embedding of a pass."""
        lanes = lanes * self.wiring.lanes if step.parallel and len(lanes) < self.wiring.lanes else lanes
        if step.skip is not None and step.source is not None:
            skip = hooks("skip", self.skip_weight[step.skip] * saved[step.source])
            into = lanes if self.wiring.skips == "every lane" else lanes[:1]
            lanes = [torch.lerp(skip, lane, self.skip_gate[step.skip].sigmoid()) for lane in into] + lanes[len(into) :]
        if step.entry is not None and self.config.loop_embeddings:
            lanes = [lanes[0] + hooks("loop_embed", self.loop_embed[step.entry])]
        return [hooks(f"lane{j}_pre", lane) for j, lane in enumerate(lanes)]

    def _read(self, block: Block, lanes: Lanes, x0: Tensor, weights: Weights) -> Float[Tensor, "b s d"]:
        """What a sublayer is given: the normed mixture of lanes and embedding, damped by depth."""
        if self.wiring.norm == "of each lane" and len(lanes) > 1:
            return block.damping * weighted([rms(block.mixed(lane, x0)) for lane in lanes], weights)
        return block.damping * rms(block.mixed(weighted(lanes, weights), x0))

    def _attn(self, step: Step, hooks: StepHooks, block: Block, read: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        bias = self._bias(step)
        return hooks("attn_out", block.attn_scale * block.attn(hooks("attn_read", read), turns, bias))

    def _mlp(self, hooks: StepHooks, block: Block, read: Tensor) -> Tensor:
        return hooks("mlp_out", block.mlp_scale * block.mlp(hooks("mlp_read", read)))

    def _bias(self, step: Step) -> Float[Tensor, "heads 1 d_head"] | None:
        """The bias of this pass on the keys of one head."""
        if not self.config.head_bias or step.entry is None:
            return None
        own = self.head_bias[step.entry]
        head = torch.tensor(BIASED_HEAD % self.config.heads, device=own.device)
        return functional.one_hot(head, self.config.heads).to(own.dtype)[:, None, None] * own

    def _write(self, layer: int, lanes: Lanes, a: Tensor, m: Tensor) -> Lanes:
        """Weight both sublayers into the lanes. One lane has no routing scalars: it adds them."""
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
        cap = self.config.softcap
        return self.hook_logits(cap * torch.tanh(functional.linear(normed, self.embed.weight) / cap))

    def _add_controls(self) -> None:
        """Every parameter that is no matrix of a block: routing scalars, skips, embeddings of passes."""
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
        """Normal matrices of variance 1 / d_in; the output projections 0 where the config says so."""
        nn.init.normal_(self.embed.weight, std=EMBED_STD, generator=generator)
        for block in self.blocks:
            for name, linear in block.named_modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=linear.in_features**-0.5, generator=generator)
                    if self.config.zero_init and name in ("attn.o", "mlp.down"):
                        nn.init.zeros_(linear.weight)


def weighted(lanes: Lanes, weights: Weights) -> Float[Tensor, "b s d"]:
    """The weighted sum of the lanes. A lane of weight 0 is not read at all, one of weight 1 is taken as it is."""
    read = [lane if weight == 1 else weight * lane for lane, weight in zip(lanes, weights, strict=True) if weight]
    return sum(read[1:], start=read[0])


def is_matrix(model: nn.Module, name: str) -> bool:
    """Whether the parameter of that name is a matrix (of a Linear or of the embedding); the others are controls."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding)
