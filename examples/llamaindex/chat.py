"""LlamaIndex with a model that Laya serves: an answer that streams, in a window that LlamaIndex knows.

pip install llama-index-llms-openai-like; LAYA_URL, LAYA_MODEL and LAYA_API_KEY say where and what.
"""

import os

import httpx
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("LAYA_URL", "http://127.0.0.1:8000") + "/v1"
MODEL = os.environ.get("LAYA_MODEL", "smollm2")
KEY = os.environ.get("LAYA_API_KEY", "none")

served = httpx.get(f"{URL}/models/{MODEL}", headers={"authorization": f"Bearer {KEY}"}).raise_for_status().json()
llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    context_window=served["context_length"],
    max_tokens=64,
    temperature=0,
    is_chat_model=True,
)
print(f"{llm.metadata.model_name}: a window of {llm.metadata.context_window} tokens")
for piece in llm.stream_chat([ChatMessage(role="user", content="Say hello in one sentence.")]):
    print(piece.delta, end="", flush=True)
print()
