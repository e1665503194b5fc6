"""Stands in for a user's own llama-server: takes its flags, serves its endpoints, computes nothing.

It is strict about flags as the real one is, prints where it listens, answers 503 to the first request as if it were
still loading, and shows what it was started with under /started.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VALUES = (
    "model alias host port timeout threads-http ctx-size parallel cache-type-k cache-type-v flash-attn batch-size "
    "ubatch-size n-gpu-layers threads threads-batch load-mode spec-type fit cache-ram ctx-checkpoints chat-template "
    "slot-prompt-similarity "
    "mmproj lora model-draft n-gpu-layers-draft split-mode tensor-split n-cpu-moe "
    "pooling top-k flood-bytes greed-mib greed-later-mib verbosity offloads"
)
SWITCHES = (
    "jinja no-webui offline slots props metrics no-context-shift no-cache-idle-slots kv-unified no-kv-unified "
    "embedding rerank no-mmproj-offload stubborn spawn-sleeper abort"
)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"error: invalid argument: {message}", file=sys.stderr)
        sys.exit(1)


def parse():
    parser = Parser(allow_abbrev=False)
    for name in VALUES.split():
        parser.add_argument("--" + name)
    for name in SWITCHES.split():
        parser.add_argument("--" + name, action="store_true")
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, {"status": "ok"})
        if self.path == "/started":
            return self.answer(200, {"argv": sys.argv[1:], "environment": dict(os.environ), "sleeper": sleeper_pid})
        return self.answer(404, {"error": {"message": "no such path"}})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        Handler.asked += 1
        if Handler.asked == 1:
            return self.answer(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        if self.headers.get("authorization") != f"Bearer {os.environ['LLAMA_API_KEY']}":
            return self.answer(401, {"error": {"message": "Invalid API Key"}})
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if self.path == "/v1/completions":
            return self.answer(200, {"model": flags.alias, "choices": [{"text": " there"}], "usage": usage})
        if self.path != "/v1/chat/completions":  # as an older one, which does not count tokens
            return self.answer(404, {"error": {"message": "no such path"}})
        take(flags.greed_later_mib)
        message = {"role": "assistant", "content": "there"}
        return self.answer(200, {"model": flags.alias, "choices": [{"message": message}], "usage": usage})

    def log_message(self, *_):
        print(f"0.00.000.002 I srv  log_server_r: {self.command} {self.path}", file=sys.stderr)


def take(mib):
    """Memory that no plan knows of, kept."""
    for _ in range(int(mib or 0)):
        taken.append(b"x" * 2**20)


taken = []
if "--list-devices" in sys.argv:
    print("Available devices:\n  CUDA0: NVIDIA GeForce RTX 4090 (24564 MiB, 23752 MiB free)")
    sys.exit(0)
flags = parse()
take(flags.greed_mib)
sleeper_pid = subprocess.Popen(["sleep", "600"]).pid if flags.spawn_sleeper else None
if flags.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if flags.flood_bytes:
    sys.stderr.write(("x" * 99 + "\n") * (int(flags.flood_bytes) // 100))
if flags.abort:
    print("ggml.c:1: GGML_ASSERT(true == false) failed", file=sys.stderr, flush=True)
    os.abort()
print("0.00.000.001 I load_tensors: loading model tensors, this can take a while...", file=sys.stderr)
if flags.offloads is not None:  # as a build with a GPU; without, it computes on the CPU and says so
    print(f"0.00.000.001 I load_tensors: offloaded {flags.offloads}/33 layers to GPU", file=sys.stderr)
print("0.00.000.001 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB", file=sys.stderr)
if int(flags.offloads or 0):
    print("0.00.000.001 I load_tensors:        CUDA0 model buffer size =  4685.30 MiB", file=sys.stderr)
server = ThreadingHTTPServer((flags.host, int(flags.port)), Handler)
print(f"0.00.000.001 I srv          init: listening on http://127.0.0.1:{server.server_port}", file=sys.stderr)
server.serve_forever()
