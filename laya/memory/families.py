"""Owns: what llama.cpp does by architecture where the file's metadata alone does not say it; one row each.

Three tables: which architectures use a sliding window and with which pattern, where recurrent layers are, and whose
graph was measured. An architecture in none of them is planned from its keys alone, as a named upper bound. Source:
the architecture loaders of llama.cpp b11434; see docs/memory.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Window(NamedTuple):
    """How an architecture spreads its window where `attention.sliding_window_pattern` is absent."""

    period: int  # one layer in so many sees all tokens; 0 = every layer has the window
    tokens: int | None = None  # the window the loader sets itself, whatever the key says
    default: int = 0  # the window where the key is absent
    dense_first: bool = False  # the layer that sees all tokens is the first of its period, not the last
    is_chunked: bool = False
    only_n_layer: int | None = None  # the loader knows the window for this size of the model alone


WINDOWS = {
    "afmoe": Window(4),
    "cohere2": Window(4),
    "cohere2moe": Window(4),
    "exaone-moe": Window(4),
    "exaone4": Window(4, default=4096, only_n_layer=64),
    "gemma2": Window(2, default=4096),
    "gemma3": Window(6),
    "gemma3n": Window(5),
    "gemma4": Window(6),
    "gpt-oss": Window(2),
    "granite_swa": Window(4),
    "laguna": Window(4),
    "lfm2": Window(0),
    "llama4": Window(4, tokens=8192, default=8192, is_chunked=True),
    "mellum": Window(4),
    "mimo2": Window(6),
    "olmo2": Window(4),  # OLMo 3 goes by this name, with the window key
    "plamo3": Window(8),
    "smallthinker": Window(4, tokens=4096, dense_first=True),
    "step35": Window(4),
}
# Layers with a cache of their own, where the loader fixes it: the later ones read the cache of an earlier layer.
CACHED_LAYERS = {"gemma3n": 20}

# Where the recurrent layers are. "all": every layer, no attention. "beside": every layer, with attention. "interval":
# all but one in `attention.full_attention_interval`. "ff": no KV heads and no feed-forward. Others: no KV heads.
RecurrentRule = Literal["all", "beside", "interval", "ff"]
RECURRENT: dict[str, RecurrentRule] = {
    "arwkv7": "all",
    "falcon-h1": "beside",
    "mamba": "all",
    "mamba2": "all",
    "minimax-01": "interval",
    "nemotron_h": "ff",
    "nemotron_h_moe": "ff",
    "qwen35": "interval",
    "qwen35moe": "interval",
    "qwen3next": "interval",
    "rwkv6": "all",
    "rwkv6qwen2": "all",
    "rwkv7": "all",
}
# Recurrent state that can go back over a draft's tokens: the engine keeps that many states more.
ROLLS_BACK = frozenset({"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"})
HYBRID = frozenset({"granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "plamo2"})
DEFAULT_INTERVAL = {"minimax-01": 8}
# Their convolution has no groups, whatever the key says.
UNGROUPED = frozenset({"jamba", "mamba"})
FULL_ATTENTION_INTERVAL = 4

# Latent attention that is stored compressed (with the *_mla keys) or expanded (without), both as the keys say.
LATENT = frozenset(
    {"deepseek2", "deepseek2-ocr", "deepseek32", "glm-dsa", "kimi-linear", "minicpm3", "mistral4", "plm"}
)
INDEXED = frozenset({"deepseek32", "glm-dsa"})
# Which layers of GLM-5.2 have an indexer of their own where the file does not say: the first two, then one in four.
GLM_LONG_CONTEXT = 1 << 20

_DENSE = """
apertus arcee arctic baichuan bailingmoe bailingmoe2 bert bitnet bloom chatglm codeshell cogvlm command-r dbrx deci
deepseek deepseek2-ocr dots1 dream ernie4_5 ernie4_5-moe eurobert exaone falcon gemma glm4 glm4moe gpt2 gptj gptneox
granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 jina-bert-v2
jina-bert-v3 k2-horizon llada llada-moe llama llama-embed maincoder minicpm minimax-m2 mistral3 mpt nanbeige
nemotron neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe
plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact rnd1 seed_oss smollm3 stablelm starcoder
starcoder2 talkie xverse
"""
DENSE = frozenset(_DENSE.split())
# Encoders, which llama.cpp gives no cache; another architecture keeps one even with `attention.causal: false`.
ENCODERS = frozenset({"bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada",
                      "llada-moe", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1"})  # fmt: skip
# What a plan of these architectures says of cache and state is exact to the byte.
KNOWN = DENSE | LATENT | HYBRID | ENCODERS | frozenset(WINDOWS) | frozenset(RECURRENT)

# Architectures whose graph was measured on a CPU: tests hold the compute term of each to what the engine reserves.
_MEASURED = """
afmoe arcee arctic baichuan bailingmoe bailingmoe2 bert bitnet bloom chatglm codeshell cogvlm cohere2 cohere2moe
command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 dots1 dream ernie4_5 ernie4_5-moe eurobert exaone
exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe gpt-oss
gpt2 gptneox granite granite_swa granitehybrid granitemoe grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3
internlm2 jais jais2 jamba jina-bert-v3 k2-horizon kimi-linear laguna lfm2 lfm2moe llada llama llama4 maincoder
mamba mamba2 mellum mimo2 minicpm minicpm3 minimax-m2 mistral3 mistral4 modern-bert mpt nanbeige nemotron nemotron_h
neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo
plamo2 plamo3 qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe refact rwkv7
seed_oss smallthinker smollm3 stablelm starcoder starcoder2 step35 talkie xverse
"""
MEASURED = frozenset(_MEASURED.split())
