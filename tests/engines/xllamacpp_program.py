"""llama.cpp's server as any program of a user's own, without a key.

`xllamacpp_program.py PORT MODEL_FILE [--chat-template FILE] [--embedding]`
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("model")
parser.add_argument("--chat-template", type=Path)
parser.add_argument("--embedding", action="store_true")
options = parser.parse_args()
params = xllamacpp.CommonParams()
for name, value in {"port": options.port, "n_ctx": 2048, "n_parallel": 2, "n_gpu_layers": 0, "ui": False}.items():
    setattr(params, name, value)
params.model.path = options.model
params.model_alias = ["their-name"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_batch = params.n_ubatch = 128
params.fit_params = False
if options.chat_template:
    params.chat_template = options.chat_template.read_text()
if options.embedding:
    params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
server = xllamacpp.Server(params)
while True:
    signal.pause()
