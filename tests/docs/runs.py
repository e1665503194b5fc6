"""Owns: how each command of the pages is tried: run here, in which order; by another test; or not, and why not.

A command that is in none of these tables, or a line of a table that is on no page, fails tests/docs/test_commands.py.
"""

from __future__ import annotations

# Run in a folder of its own with `examples/` in it, without a server. What it exits with.
ALONE: dict[str, int] = {
    "laya plan smollm2 --max-seq-len 8192 --max-num-seqs 4": 0,
    "laya plan smollm2": 0,
    "laya plan smollm2 --max-num-seqs 64 --max-seq-len 8192 --memory 4GiB": 3,
    "laya plan --params examples/plans/experts-26b.json --max-seq-len 4096 --max-num-seqs 1 --memory 64GiB": 0,
    "laya plan --params examples/plans/experts-26b-q4.json --max-seq-len 4096 --max-num-seqs 1 --memory 64GiB "
    "--gpu-memory 12GiB": 0,
    "laya plan --params examples/plans/dense-7b.json --max-seq-len 4096 --max-num-seqs 1 --memory 64GiB": 0,
    "laya plan --params examples/plans/dense-7b-q4.json --max-seq-len 4096 --max-num-seqs 1 --memory 64GiB": 0,
    "laya plan --params examples/plans/dense-7b-q4.json --max-seq-len 4096 --max-num-seqs 1 --kv-cache-dtype q8_0 "
    "--memory 64GiB": 0,
    "laya plan --params examples/plans/dense-7b.json --table --memory 64GiB": 0,
    "laya plan --params examples/plans/grouped-7b.json --max-seq-len 4096 --max-num-seqs 1 --memory 64GiB": 0,
    "laya plan --compare examples/plans/streamed.yaml examples/plans/whole.yaml": 0,
    "laya import llama-swap config.yaml --out laya.yaml": 0,  # config.yaml is llama-swap's there
    "laya config check --config laya.yaml": 0,
    "laya plan --config laya.yaml": 0,
    "laya import ollama ./mario/Modelfile": 0,
    "laya config example": 0,
    "laya config schema": 0,
    "laya config hash-key": 0,
    "laya engines list": 0,
    "laya list": 0,
    "laya pull smollm2": 0,  # it is there already
    "laya show smollm2": 0,
    "laya service show [--user]": 0,
}

# Run against the suite's shared server.
SERVED: dict[str, int] = {
    "laya ps": 0,
    "laya load laya-nano": 0,
    "laya connect": 0,
    "laya connect open-webui": 0,
    "laya route explain --model smollm2-135m": 0,
}

# Run by another test, on files and servers of its own.
ELSEWHERE: dict[str, str] = {
    "curl http://127.0.0.1:8000/v1/chat/completions": "tests/docs/test_commands.py",
    "curl -N http://127.0.0.1:8000/v1/chat/completions": "tests/docs/test_commands.py",
    "curl http://127.0.0.1:8000/v1/systemone": "tests/gateway/test_systemone.py",
    "curl http://127.0.0.1:8000/admin/models/laya-nano/experts": "tests/experts",
    "laya chat smollm2 'Name three colours.'": "tests/cli/test_cli_chat.py",
    "python tools/benchmark_router.py": "tests/routing/test_benchmark_router.py",
    "laya config check": "tests/cli/test_cli_config.py",
    "laya config show": "tests/cli/test_cli_config.py",
    "laya config migrate": "tests/packaging/test_migrate.py",
    "laya logs my-model -f": "tests/cli/test_running.py",
    "laya import ollama ~/.ollama/models": "tests/cli/test_import_ollama.py",
    "laya import litellm config.yaml > laya.yaml": "tests/cli/test_import_litellm.py",
    "laya serve --config laya.yaml": "tests/cli/test_import_serves.py",
    "laya serve --ray": "tests/cluster",
    "laya key": "tests/cli/test_key.py",
    "laya train laya-nano": "tests/training/test_train.py",
    "laya upcycle smollm2": "tests/training/test_upcycle.py",
    "laya export": "tests/modeling/test_export.py",
    "laya experts path/to": "tests/cli/test_experts.py",
    "laya pull hf://": "tests/models/test_hub.py",
    "laya rm smollm2": "tests/models/test_cli.py",
    "laya quantize smollm2": "tests/quantization/test_make.py",
    "laya quantize ./mine-f16.gguf": "tests/quantization/test_quantize.py",
    "laya quantize mine:f16": "tests/quantization/test_calibrate.py",
    "laya quantize ./mine --to": "tests/quantizers/test_folders.py",
    "laya eval smollm2": "tests/quantization/test_eval.py",
    "laya eval runs/nano/model": "tests/quantizers/test_folders.py",
    "laya plan qwen3-8b --quantization auto": "tests/gateway/test_variants.py",
    "laya serve qwen3-8b --quantization auto": "tests/gateway/test_variants.py",
    "laya route explain --model auto": "tests/cli/test_route.py",
    "laya connect aider > connect.sh": "tests/clients/test_clients.py",
    "laya doctor": "tests/cli/test_doctor.py",
    "laya service install --user": "tests/cli/test_service.py",
    "laya service uninstall": "tests/cli/test_service.py",
    "laya serve smollm2 &": "tests/cli/test_serve.py",
    "ray start": "tests/cluster",
}

# Not run by the tests. Why not.
NOT_RUN: dict[str, str] = {
    "make serve": "`make serve` of a clean clone is what a release is tried with; the tests run what it runs",
    "make test": "it is what runs this",
    "make lint": ".ci/run runs it first",
    ".ci/run": "it is what runs this",
    ". .venv/bin/activate": "changes a shell",
    "mkdir -p models": "nothing of Laya's",
    "pip install": "needs a package index; .ci/run installs the extras by `make test` and `make test-quant`",
    "python3 -m venv ~/vllm": "vLLM for GPUs; `make test-vllm` installs its CPU build so",
    "laya engines install cuda": "needs an NVIDIA card; tests/cli/test_engines.py installs for a played one",
    "sudo laya service install": "needs root and systemd; tests/cli/test_service.py writes the same unit",
    ". ./connect.sh": "changes a shell",
    "OPENAI_API_BASE_URL=": "Open WebUI pins packages of its own, some 3 GB of them",
    "docker ": "needs Docker; `make test-packaging` runs the Dockerfile's steps without it",
    "LAYA_MEMORY=8g docker": "needs Docker; tests/packaging checks the compose files",
    "cd deploy/compose": "before `docker compose`",
    "./make_secrets": "before `docker compose`: it writes into the repository",
    "cat secrets/admin_key": "after `./make_secrets`",
    "kubectl ": "needs a cluster; tests/packaging holds the manifest to Kubernetes' schema",
    "OPENAI_API_KEY=none lm_eval": "lm-eval is not among what the tests install; tried by hand, as tested_with.md says",
}
