"""Tiny random models of every class of transformers whose row is found, or stands in the table."""

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CHUNK = {"attention_chunk_size": 16}
SCALED = {"embedding_multiplier": 2.0, "residual_multiplier": 0.22, "attention_multiplier": 0.25, "logits_scaling": 2.0}
OLD = {"vocab_size": 64, "hidden_size": 32}

DECODERS: dict[str, dict[str, Any]] = {
    "Qwen2": SIZES,
    "Qwen3": SIZES | HEAD,
    "Qwen2Moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 24},
    "Qwen3Moe": SIZES | HEAD | EXPERTS,
    "Qwen3Next": SIZES | HEAD | EXPERTS | DELTA | {"shared_expert_intermediate_size": 24, "num_hidden_layers": 4},
    "Mixtral": SIZES | LOCAL,
    "GptOss": SIZES | HEAD | LOCAL | WINDOW,
    "Olmoe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": SIZES | ROUTED | LATENT | {"num_key_value_heads": 4},
    "Llama": SIZES,
    "Llama4": SIZES | HEAD | {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_hidden_layers": 4} | CHUNK,
    "Mistral": SIZES,
    "Gemma": SIZES | HEAD,
    "Gemma2": SIZES | HEAD | WINDOW | {"query_pre_attn_scalar": 8},
    "Gemma3": SIZES | HEAD | WINDOW | {"query_pre_attn_scalar": 8},
    "Gemma3ForConditionalGeneration": SIZES | HEAD | WINDOW | {"query_pre_attn_scalar": 8},
    "Phi": SIZES,
    "Phi3": SIZES,
    "Olmo2": SIZES,
    "Olmo3": SIZES | WINDOW,
    "SmolLM3": SIZES,
    "Granite": SIZES | SCALED,
    "Glm4": SIZES | HEAD,
    "Glm4Moe": SIZES | HEAD | ROUTED | {"n_group": 1},
    "Falcon": OLD | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
    "OPT": OLD | {"ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    "Bloom": OLD | {"n_layer": 2, "n_head": 4},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "StableLm": SIZES,
    "Cohere": SIZES,
    "Cohere2": SIZES | HEAD | WINDOW,
}  # fmt: skip
"""Name of a class, without ``ForCausalLM`` or ``LMHeadModel`` -> its config; of a wrapper, its config of text."""

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14
}  # fmt: skip

EAGER = ("GptOss", "Bloom", "Gemma2")
"""Classes whose own attention is the only one that transformers runs, or the exact one."""


def make_decoder(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return the model, the same for every call, with ``changes`` of its config."""
    wrapper = name.endswith("Generation")
    cls: Any = getattr(transformers, name if wrapper else "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    sizes = DECODERS[name] | changes
    config = (
        cls.config_class(text_config=sizes, vision_config=VISION, mm_tokens_per_image=4) if wrapper else cls.config_class(**sizes)
    )
    config._attn_implementation = "eager" if name in EAGER else "sdpa"
    config._experts_implementation = "eager"  # the grouped products have no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).to(dtype).eval()
