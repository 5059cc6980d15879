"""Model of the server's soak test: random and small."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mi_route2.hosts import open_host
from mi_route2.serve.models import Served
from mi_route2.serve.soak import CONTEXT, FIRST, LAYERS, WIDTH, Bytes
from mi_route2.specs import AdapterSpec


def model() -> Served:
    """Return the model of the soak: a random Qwen3 with grouped queries, and both adapters."""
    config = Qwen3Config(
        vocab_size=FIRST + 256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
    )
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        host = open_host("torch", Qwen3ForCausalLM(config).eval())
    adapters = host.attach("blocks.*.mlp.*", spec=AdapterSpec("lora", rank=2, quarantine_rank=2), generator=draw)
    with torch.no_grad():
        for p in (*adapters.kept_parameters().values(), *adapters.quarantine_parameters().values()):
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    vectors = {name: torch.randn(WIDTH, generator=draw) for name in ("probe", "push")}
    return Served("soak", host, Bytes(), adapters, vectors=vectors)
