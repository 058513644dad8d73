"""Small random models of the decoder families, for the tests and for scripts/architectures."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiniCPM3Config,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    Zamba2Config,
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
ROUTING = {
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
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

SUPPORTED_FAMILIES = PLAIN_FAMILIES | WINDOW_FAMILIES | LATENT_FAMILIES | RECURRENT_FAMILIES
MORE_FAMILIES: dict[str, PreTrainedConfig] = {
    "cohere2": Cohere2Config(**GROUPED, sliding_window=WINDOW, layer_types=ALTERNATING),
    "ernie-4.5": Ernie4_5Config(**GROUPED),
    "exaone-4": Exaone4Config(**GROUPED, sliding_window=WINDOW, layer_types=ALTERNATING),
    "glm-4": Glm4Config(**GROUPED, head_dim=16),
    "glm-4-moe-lite": Glm4MoeLiteConfig(**LATENT),
    "gptj": GPTJConfig(**GPT_2, rotary_dim=8),
    "granite-moe-hybrid": GraniteMoeHybridConfig(
        **GROUPED,
        **MAMBA_2,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "kimi-linear": KimiLinearConfig(
        **{name: size for name, size in LATENT.items() if name not in ROUTING},
        moe_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=16,
        linear_num_heads=2,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2-moe": Lfm2MoeConfig(
        **GROUPED, **EXPERTS, conv_L_cache=3, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "minicpm3": MiniCPM3Config(**{name: size for name, size in LATENT.items() if name not in ROUTING}),
    "olmo3": Olmo3Config(**GROUPED, sliding_window=WINDOW, layer_types=ALTERNATING),
    "olmo-hybrid": OlmoHybridConfig(**GROUPED, **DELTA, layer_types=["linear_attention", "full_attention"]),
    "phi": PhiConfig(**GROUPED),
    "phi-moe": PhimoeConfig(**GROUPED, num_local_experts=4),
    "qwen2-moe": Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3.5": Qwen3_5TextConfig(**GROUPED, **DELTA, head_dim=16, layer_types=["linear_attention", "full_attention"]),
    "smollm3": SmolLM3Config(**GROUPED),
    "stablelm": StableLmConfig(**GROUPED),
    "starcoder2": Starcoder2Config(**GROUPED, sliding_window=WINDOW),
}
REFUSED_FAMILIES: dict[str, PreTrainedConfig] = {
    # Their attention is not the one that transformers lets us replace.
    "bloom": BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4),
    "falcon": FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    "falcon-alibi": FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "mpt": MptConfig(vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    # The window is in its mask, but it does not tell the attention of it.
    "qwen2-moe-window": Qwen2MoeConfig(
        **GROUPED,
        **EXPERTS,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 2,
        shared_expert_intermediate_size=32,
    ),
    # transformers' Mamba 1 begins anew where several tokens follow a state.
    "falcon-mamba": FalconMambaConfig(vocab_size=128, hidden_size=64, state_size=8, num_hidden_layers=2),
    "jamba": JambaConfig(
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    # transformers' time steps have a smallest value where several tokens are run, and none where one is.
    "nemotron-h": NemotronHConfig(
        **GROUPED,
        layers_block_type=["mamba", "attention"],
        head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        mamba_num_heads=8,
        mamba_head_dim=16,
        chunk_size=16,
    ),
    "zamba2": Zamba2Config(
        **SIZES | {"num_hidden_layers": 4},
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        adapter_rank=8,
        chunk_size=16,
    ),
    # They have a cache of their own.
    "minimax": MiniMaxConfig(
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
        block_size=16,
    ),
    "recurrent-gemma": RecurrentGemmaConfig(
        **{name: size for name, size in SIZES.items() if name != "max_position_embeddings"} | {"num_hidden_layers": 3},
        lru_width=64,
        attention_window_size=WINDOW,
    ),
    "rwkv": RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, context_length=CONTEXT),
    # By their configuration.
    "deepseek-v3.2": DeepseekV32Config(**LATENT, index_n_heads=2, index_head_dim=16, index_topk=8),
    "gemma3n": Gemma3nTextConfig(**GROUPED, num_kv_shared_layers=2),
    "llama4": Llama4TextConfig(**GROUPED, attention_chunk_size=16, num_local_experts=2),
}


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """With weights large enough that its attention is peaked and its logits lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    return model
