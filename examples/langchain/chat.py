"""LangChain with a model that Laya serves: an answer that streams, and one that is held to a schema.

pip install langchain-openai; LAYA_URL, LAYA_MODEL and LAYA_API_KEY say where and what.
"""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city, in the words of a model."""

    name: str = Field(max_length=20)
    is_capital: bool


model = ChatOpenAI(
    base_url=os.environ.get("LAYA_URL", "http://127.0.0.1:8000") + "/v1",
    model=os.environ.get("LAYA_MODEL", "smollm2"),
    api_key=os.environ.get("LAYA_API_KEY", "none"),
    max_tokens=256,
    temperature=0,
)

for chunk in model.stream("Say hello in one sentence."):
    print(chunk.text, end="", flush=True)
print()
print(repr(model.with_structured_output(City, method="json_schema").invoke("Tell me about Paris.")))
