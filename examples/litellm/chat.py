"""LiteLLM as a client of Laya: an answer that streams, with its tokens counted at the end.

pip install litellm; LAYA_URL, LAYA_MODEL and LAYA_API_KEY say where and what.
"""

import os

import litellm

stream = litellm.completion(
    model="openai/" + os.environ.get("LAYA_MODEL", "smollm2"),
    api_base=os.environ.get("LAYA_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("LAYA_API_KEY", "none"),
    messages=[{"role": "user", "content": "Say hello in one sentence."}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if getattr(chunk, "usage", None):
        print(f"\n{chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} written")
