"""Owns: the names that Hugging Face configs have for architectures and figures, beside those of GGUF metadata.

One row each, so that a reader can check them: `model_type` -> the architecture as llama.cpp calls it; what a layer's
word in `layer_types` means; how the bytes of a weight follow from `quantization_config`. Knows no file.
"""

from __future__ import annotations

# model_type -> llama.cpp's name. What is absent is planned under its own name, from its figures, as an upper bound.
_NAMES = """
AquilaForCausalLM=llama apertus=apertus arcee=arcee arctic=arctic baichuan=baichuan bailing_moe=bailingmoe
bailing_moe_v2=bailingmoe2 bamba=granitehybrid bert=bert bitnet=bitnet bloom=bloom chatglm=chatglm cohere=command-r
cohere2=cohere2 dbrx=dbrx deepseek=deepseek deepseek_v2=deepseek2 deepseek_v3=deepseek2 deepseek_v32=deepseek32
dots1=dots1 ernie4_5=ernie4_5 ernie4_5_moe=ernie4_5-moe exaone=exaone exaone4=exaone4 exaone_moe=exaone-moe
falcon=falcon falcon_h1=falcon-h1 gemma=gemma gemma2=gemma2 gemma3=gemma3 gemma3_text=gemma3 gemma3n=gemma3n
gemma3n_text=gemma3n gemma4=gemma4 gemma4_text=gemma4 glm=glm4 glm4=glm4 glm4_moe=glm4moe glm4_moe_lite=deepseek2
glm_moe_dsa=glm-dsa gpt2=gpt2 gpt_bigcode=starcoder gpt_neox=gptneox gpt_oss=gpt-oss gptj=gptj granite=granite
granitemoe=granitemoe granitemoehybrid=granitehybrid granitemoeshared=granitemoe grok-1=grok hunyuan=hunyuan-moe
hunyuan_v1_dense=hunyuan-dense hunyuan_v1_moe=hunyuan-moe internlm2=internlm2 internlm3=llama jais=jais jamba=jamba
kimi_k2=deepseek2 kimi_linear=kimi-linear laya=llama lfm2=lfm2 lfm2_moe=lfm2moe llada=llada llama=llama llama4=llama4
llama4_text=llama4 mamba=mamba mamba2=mamba2 minicpm=minicpm minicpm3=minicpm3 minimax_m2=minimax-m2
mimo_v2_flash=mimo2 minimax_text_01=minimax-01 minimax_m1=minimax-01 minimax=minimax-01 ministral3=mistral3
mistral=llama mistral3=mistral3 mixtral=llama modernbert=modern-bert mpt=mpt nemotron=nemotron nemotron_h=nemotron_h
new=bert nomic_bert=nomic-bert olmo=olmo olmo2=olmo2 olmo3=olmo2 olmoe=olmoe openelm=openelm orion=orion phi=phi2
phi3=phi3 phi4=phi3 phimoe=phimoe plamo=plamo plamo2=plamo2 plamo3=plamo3 qwen=qwen qwen2=qwen2 qwen2_moe=qwen2moe
qwen2_vl=qwen2vl qwen2_vl_text=qwen2vl qwen2_5_vl=qwen2vl qwen2_5_vl_text=qwen2vl qwen2_5_omni_text=qwen2vl
qwen3=qwen3 qwen3_5=qwen35 qwen3_5_text=qwen35 qwen3_5_moe=qwen35moe qwen3_5_moe_text=qwen35moe qwen3_moe=qwen3moe
qwen3_next=qwen3next qwen3_vl=qwen3vl qwen3_vl_text=qwen3vl qwen3_vl_moe=qwen3vlmoe qwen3_vl_moe_text=qwen3vlmoe
roberta=bert rwkv6=rwkv6 rwkv7=rwkv7 seed_oss=seed_oss smallthinker=smallthinker smollm3=smollm3 stablelm=stablelm
starcoder2=starcoder2 step3p5=step35 xlm-roberta=bert xverse=xverse yi=llama
"""
ARCHITECTURES = dict(pair.split("=") for pair in _NAMES.split())

# How a layer is said to look back, in `layer_types` and its kin.
WINDOW_WORDS = frozenset({"sliding_attention", "sliding_window", "sliding", "local", "local_attention", "swa",
                          "chunked_attention", "sliding_window_attention"})  # fmt: skip
STATE_WORDS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "short_conv", "recurrent", "kda", "linear",
                         "gated_delta_net", "lightning_attention", "rwkv", "ssm", "m"})  # fmt: skip
NO_CACHE_WORDS = frozenset({"mlp", "moe", "dense", "-", "e"})
ATTENTION_WORDS = frozenset({"full_attention", "attention", "global", "global_attention", "full", "hybrid", "*",
                             "causal_attention", "softmax_attention", "deepseek_sparse_attention"})  # fmt: skip

# Every figure, by GGUF's key, under the names that configs have for it; the first that is there counts.
FIGURES = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "embedding_length": ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "dim"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads",
                                "multi_query_group_num", "num_attention_groups"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head", "d_head"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "mlp_hidden_size",
                            "intermediate_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "context_length": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "max_seq_len",
                       "max_seq_length", "n_ctx", "model_max_length", "max_context_length"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
                     "moe_num_primary_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts",
                          "moe_k", "experts_per_token", "num_selected_experts", "moe_num_active_primary_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size",
                                   "expert_ffn_hidden_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                                          "shared_intermediate_size", "intermediate_size_shared", "share_expert_dim"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers"),
    "nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
}  # fmt: skip

# What a `torch_dtype` of the config takes, in bytes.
DTYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8": 1, "int8": 1,
}  # fmt: skip

# quant_method -> bits of a weight of a linear layer, scales and zero points in (groups of 128 unless the config says
# otherwise); None: the config says how many bits. Embeddings, heads, norms and routers stay as they were.
QUANTIZED_BITS: dict[str, float | None] = {
    "auto-round": None, "autoround": None, "awq": None, "aqlm": None, "bitnet": 2.0, "bitsandbytes": None,
    "compressed-tensors": None, "eetq": 8.01, "fbgemm_fp8": 8.02, "fp8": 8.02, "gptq": None, "gptq_marlin": None,
    "higgs": None, "hqq": None, "modelopt": None, "mxfp4": 4.25, "nvfp4": 4.51, "quark": 8.1, "torchao": 8.1,
    "vptq": None,
}  # fmt: skip
