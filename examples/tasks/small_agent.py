"""A small agent: a model calls tools over the files of a folder until it has an answer. Works with small models.

    laya serve smollm2 &
    python examples/tasks/small_agent.py ~/notes "How many words have all files together?"

Small models know what to call and seldom how to write it. So every step is a call for certain (`tool_choice:
required`): the engine holds the answer to the tools' schemas while it is made, the names of files are an enum, and the
final answer is a tool too. What a model chooses may be silly; that it is a call which can be run is not left to it.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import sys
from pathlib import Path
from typing import Any

import httpx

SUFFIXES = {".txt", ".md", ".rst", ".log"}
MOST_FILES = 50  # the schemas of forced tools are bounded
OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
NUMBER = {"type": "integer", "minimum": -999999, "maximum": 999999}


def tools_for(files: list[str]) -> list[dict[str, Any]]:
    """What the model is told it can call."""
    return [
        _tool("count_words", "Count the words of a file.", file={"type": "string", "enum": files}),
        _tool("calculate", "Calculate with two numbers.", a=NUMBER, do={"enum": list(OPERATIONS)}, b=NUMBER),
        _tool("answer", "Say the final answer.", text={"type": "string", "maxLength": 120}),
    ]


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def run_tool(folder: Path, name: str, arguments: dict[str, Any]) -> str:
    """What a call comes to. The engine has held the arguments to the schema, so they are there and of their types."""
    if name == "count_words":
        return str(len((folder / arguments["file"]).read_text(errors="replace").split()))
    return str(OPERATIONS[arguments["do"]](arguments["a"], arguments["b"]))


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One turn of the model."""
    key = os.environ.get("LAYA_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=600, trust_env=False)
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        sys.exit(f"no answer from {url}: {error}")
    if response.status_code != 200:
        sys.exit(f"/v1/chat/completions: {answer['error']['message']}")
    choice: dict[str, Any] = answer["choices"][0]
    if choice["finish_reason"] == "length":
        sys.exit("the call was cut off: --max-tokens is too small for it")
    message: dict[str, Any] = choice["message"]
    return message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", nargs="?", default="How many words have all files together?")
    parser.add_argument("--url", default=os.environ.get("LAYA_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=6, help="most calls; the last one is the answer (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of one call (%(default)s)")
    args = parser.parse_args()
    files = sorted(path.name for path in args.folder.glob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        sys.exit(f"{args.folder}: no files that end in {', '.join(sorted(SUFFIXES))}")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Call one tool at a time. Call answer when you know the answer."},
        {"role": "user", "content": args.question},
    ]
    tools = tools_for(files[:MOST_FILES])
    body = {"model": args.model, "tools": tools, "max_tokens": args.max_tokens, "temperature": 0}
    for step in range(1, args.steps + 1):
        must_answer = step == args.steps
        choice: Any = {"type": "function", "function": {"name": "answer"}} if must_answer else "required"
        message = asked(args.url, body | {"messages": messages, "tool_choice": choice})
        (call,) = message["tool_calls"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if name == "answer":
            print(arguments["text"])
            return
        result = run_tool(args.folder, name, arguments)
        said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        print(f"{step}. {name}({said}) = {result}", file=sys.stderr)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]


if __name__ == "__main__":
    main()
