"""A small server of OpenAI's API, as a program of a user's own is: chat, streams, tools, embeddings, ways to fail.

Standard library only, one thread a connection. What it knows it gets from its command line, as such programs do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["Hello", " from", " a", " program"]
held: list[bytearray] = []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="its-own-name")
    parser.add_argument("--any-model", action="store_true", help="answer under its own name to whatever it is called")
    parser.add_argument("--api-key")
    parser.add_argument("--fail", default="", help="how it fails: exits, deaf, 500, shape, sick, stubborn, taken")
    parser.add_argument("--once", help="a file: what it fails at, it fails at until this is there")
    parser.add_argument("--hold", type=int, default=0, help="MiB it takes at its first request but the start's")
    parser.add_argument("--by-child", action="store_true", help="another process of it takes what --hold says")
    parser.add_argument("--child", action="store_true", help="start a process that holds 32 MiB and sleeps")
    parser.add_argument("--no-streams", action="store_true", help="answer whole, whatever it is asked for")
    parser.add_argument("--moody", action="store_true", help="a request that says hang or stall gets that")
    parser.add_argument("--leaves", action="store_true", help="start a process that steps out of its session")
    parser.add_argument("--detached", action="store_true", help="and whose parent has ended")
    parser.add_argument("--seconds-a-word", type=float, default=0.0)
    return parser.parse_args()


ARGS = arguments()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        sys.stderr.write(f"{self.command} {self.path}\n")

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(
                {"status": "ok"} if ARGS.fail != "sick" else {"status": "loading"}, 200 if ARGS.fail != "sick" else 503
            )
        elif self.path == "/started":
            self.reply(
                {
                    "argv": sys.argv,
                    "environment": dict(os.environ),
                    "cwd": os.getcwd(),
                    "pid": os.getpid(),
                    "child": CHILD.pid if CHILD else None,
                    "left": LEFT,
                }
            )
        else:
            self.reply({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer, status = self.answer(body)
        if answer is not None:
            self.reply(answer, status)

    def answer(self, body: dict[str, Any]) -> tuple[Any, int]:
        """What to reply, and its status; nothing where it was streamed."""
        if ARGS.api_key and self.headers.get("authorization") != f"Bearer {ARGS.api_key}":
            return {"error": {"message": "wrong key"}}, 401
        if ARGS.fail == "500":
            return {"error": {"message": "the kernel is missing"}}, 500
        if ARGS.fail == "shape":
            return {"answer": 42}, 200
        if body.get("max_tokens") != 1 and ARGS.hold:
            if ARGS.by_child:
                subprocess.Popen([sys.executable, "-c", HOLDER.format(ARGS.hold)])
            else:
                held.append(bytearray(os.urandom(1 << 20) * ARGS.hold))
        if body.get("model") != ARGS.model and not ARGS.any_model:
            return {"error": {"message": f"no model {body.get('model')}"}}, 404
        unknown = set(body) & {"return_progress", "id_slot", "cache_prompt"}
        if unknown:
            return {"error": {"message": f"unknown fields {sorted(unknown)}"}}, 400
        if self.path == "/v1/embeddings":
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            data = [{"object": "embedding", "index": n, "embedding": [0.5, len(text)]} for n, text in enumerate(texts)]
            usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
            return {"object": "list", "model": ARGS.model, "data": data, "usage": usage}, 200
        if self.path == "/v1/systemone":
            answers = {name: {"type": "noul", "noul": 0.75} for name in body["questions"]}
            return {"model": ARGS.model, "answers": answers, "usage": {"input_tokens": 9, "output_tokens": 0}}, 200
        if self.path != "/v1/chat/completions":
            return {"error": {"message": "no such path"}}, 404
        if body.get("max_tokens", 2) > 4096:
            message = "This model's maximum context length is 4096 tokens."
            return {"error": {"message": message, "code": "context_length_exceeded"}}, 400
        self.mood = body["messages"][-1]["content"] if ARGS.moody else ""
        if self.mood == "hang":
            time.sleep(600)
        words = WORDS[: body.get("max_tokens", len(WORDS))]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(words)}
        if body.get("tools") and body.get("tool_choice") != "none":
            call = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Paris"}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            }
        usage = {"prompt_tokens": 5, "completion_tokens": len(words), "total_tokens": 5 + len(words)}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        meta = {"id": "chatcmpl-1", "created": 1, "model": ARGS.model}
        if not body.get("stream") or ARGS.no_streams:
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return meta | {"object": "chat.completion", "choices": [choice], "usage": usage}, 200
        self.stream(meta, message, words, reason, usage if body.get("stream_options") else None)
        return None, 200

    def stream(self, meta: dict[str, Any], message: dict[str, Any], words: list[str], reason: str, usage: Any) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if "tool_calls" in message:
            deltas = [{"role": "assistant", "tool_calls": [message["tool_calls"][0] | {"index": 0}]}]
        else:
            deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words)]
        try:
            for delta in deltas:
                self.event(meta, [{"index": 0, "delta": delta, "finish_reason": None}])
                time.sleep(600 if self.mood == "stall" and delta.get("content") else ARGS.seconds_a_word)
            self.event(meta, [{"index": 0, "delta": {}, "finish_reason": reason}])
            if usage:
                self.event(meta | {"usage": usage}, [])
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        except OSError:
            sys.stderr.write("client left\n")
            self.close_connection = True

    def event(self, meta: dict[str, Any], choices: list[Any]) -> None:
        self.chunk(
            b"data: " + json.dumps(meta | {"object": "chat.completion.chunk", "choices": choices}).encode() + b"\n\n"
        )

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reply(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def leave() -> int:
    """The id of a process in a session of its own."""
    if not ARGS.detached:
        if pid := os.fork():
            return pid
        os.setsid()
        time.sleep(600)
    read_fd, write_fd = os.pipe()
    if parent := os.fork():
        os.waitpid(parent, 0)
        return int(os.read(read_fd, 20))
    os.setsid()
    if pid := os.fork():
        os.write(write_fd, b"%d" % pid)
        os._exit(0)
    time.sleep(600)
    os._exit(0)


HOLDER = "import time; held = bytearray(b'x') * ({} << 20); time.sleep(600)"
SLEEPER = "import time; held = bytearray(b'x') * (32 << 20); time.sleep(600)"
CHILD = subprocess.Popen([sys.executable, "-c", SLEEPER]) if ARGS.child else None
LEFT = leave() if ARGS.leaves else None


def main() -> None:
    if ARGS.fail == "exits":
        print("loading the weights", "no such tensor: blk.0", sep="\n", flush=True)
        sys.exit(3)
    if ARGS.fail == "taken" and not os.path.exists(ARGS.once):
        open(ARGS.once, "w").close()
        print(f"OSError: [Errno 98] Address already in use: {ARGS.port}", flush=True)
        sys.exit(1)
    if ARGS.fail == "deaf":
        time.sleep(600)
    if ARGS.fail == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer(("127.0.0.1", ARGS.port), Handler).serve_forever()


main()
