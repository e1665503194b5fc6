"""llama.cpp's server as any program of a user's own: `xllamacpp_program.py PORT MODEL_FILE`, without a key."""

from __future__ import annotations

import signal
import sys

import xllamacpp

params = xllamacpp.CommonParams()
for name, value in {"port": int(sys.argv[1]), "n_ctx": 2048, "n_parallel": 2, "n_gpu_layers": 0, "ui": False}.items():
    setattr(params, name, value)
params.model.path = sys.argv[2]
params.model_alias = ["their-name"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_batch = params.n_ubatch = 128
params.fit_params = False
server = xllamacpp.Server(params)
while True:
    signal.pause()
