"""Small random models of the decoder families, for the tests and for scripts/architectures."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

CONTEXT = 512
WINDOW = 40  # shorter than the documents, longer than a question

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MULTI_QUERY = SIZES | {"num_key_value_heads": 1}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ALTERNATING = ["sliding_attention", "full_attention"]
GPT_2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "qk_nope_head_dim": 16,
}
MAMBA_2 = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
}

PLAIN_FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama-multi-query": LlamaConfig(**MULTI_QUERY),
    "llama-3-rope": LlamaConfig(**GROUPED, rope_parameters=LLAMA_3_ROPE),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2-yarn": Qwen2Config(**GROUPED, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**GROUPED, head_dim=24),
    "qwen3-moe": Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=16),
    "olmo2": Olmo2Config(**GROUPED),
    "granite": GraniteConfig(**GROUPED, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(**GPT_2),
    "gpt-bigcode-multi-query": GPTBigCodeConfig(**GPT_2, multi_query=True),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}
WINDOW_FAMILIES: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=4.0, query_pre_attn_scalar=20
    ),
    "gemma3": Gemma3TextConfig(
        **GROUPED | {"num_hidden_layers": 3},
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(**GROUPED, sliding_window=WINDOW),
    "gpt-oss-sinks": GptOssConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        layer_types=ALTERNATING,
        rope_parameters=YARN_ROPE,
    ),
}
LATENT_FAMILIES: dict[str, PreTrainedConfig] = {
    "deepseek-v2": DeepseekV2Config(**LATENT),
    "deepseek-v3": DeepseekV3Config(**LATENT),
    "deepseek-v3-yarn": DeepseekV3Config(
        **LATENT | {"q_lora_rank": None}, rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
}
RECURRENT_FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(
        **GROUPED,
        **EXPERTS,
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": Lfm2Config(**GROUPED, conv_L_cache=3, layer_types=["conv", "full_attention"]),
    "falcon-h1": FalconH1Config(**GROUPED, **MAMBA_2, mamba_d_ssm=128),
    "bamba": BambaConfig(**GROUPED, **MAMBA_2, attn_layer_indices=[1]),
    "mamba2": Mamba2Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=16, n_groups=2
    ),
}


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """With weights large enough that its attention is peaked and its logits lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    return model
