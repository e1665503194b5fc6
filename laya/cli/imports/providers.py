"""Owns: which of LiteLLM's providers speak OpenAI's API, at which address, and the variable that holds their key."""

from __future__ import annotations

from typing import NamedTuple


class Provider(NamedTuple):
    """url: None where each server has its own. adds_v1: LiteLLM's address of it ends before `/v1`."""

    url: str | None
    key_env: str | None = None
    adds_v1: bool = False


PROVIDERS: dict[str, Provider] = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "text-completion-openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "together_ai": Provider("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "fireworks_ai": Provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "xai": Provider("https://api.x.ai/v1", "XAI_API_KEY"),
    "perplexity": Provider("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "cerebras": Provider("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "deepinfra": Provider("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "nvidia_nim": Provider("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "sambanova": Provider("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "moonshot": Provider("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "dashscope": Provider("https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "ollama": Provider("http://localhost:11434", adds_v1=True),
    "ollama_chat": Provider("http://localhost:11434", adds_v1=True),
    "lm_studio": Provider("http://localhost:1234/v1"),
    "llamafile": Provider("http://127.0.0.1:8080/v1"),
    "litellm_proxy": Provider(None, "LITELLM_PROXY_API_KEY"),
    "hosted_vllm": Provider(None),
    "vllm": Provider(None),
    "custom_openai": Provider(None),
    "openai_like": Provider(None),
    "xinference": Provider(None),
    "infinity": Provider(None),
    "docker_model_runner": Provider(None),
}
_OWN_API = "its API is not OpenAI's"
OTHERS: dict[str, str] = dict.fromkeys(
    ("anthropic", "bedrock", "vertex_ai", "sagemaker", "cohere", "cohere_chat", "replicate", "watsonx", "palm",
     "ai21", "nlp_cloud", "databricks", "cloudflare", "voyage", "jina_ai", "triton", "predibase", "snowflake", "oci"),
    _OWN_API,
) | {
    "azure": f"{_OWN_API}; the address of the resource that ends in /openai/v1 can be, with engine: remote",
    "azure_ai": f"{_OWN_API}; the address of the resource that ends in /openai/v1 can be, with engine: remote",
    "huggingface": "say openai/MODEL and an api_base that ends in /v1, where the endpoint has OpenAI's API",
}  # fmt: skip
_BARE = {"gpt-": "openai", "o1": "openai", "o3": "openai", "o4": "openai", "chatgpt-": "openai",
         "text-embedding-": "openai", "claude": "anthropic", "gemini": "gemini", "command": "cohere"}  # fmt: skip


def provider_of(model: str, said: str | None) -> tuple[str, str]:
    """(provider, the model as it calls it); the provider is "" where the name tells none."""
    head, slash, rest = model.partition("/")
    if said:
        return said, rest if slash and head == said else model
    if slash:
        return head, rest
    return next((provider for prefix, provider in _BARE.items() if model.startswith(prefix)), ""), model
