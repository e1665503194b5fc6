"""Engine settings on the command line, in three spellings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.config import Config, parse_engine_flags, with_settings
from laya.config.flags import FLAGS, REFUSED
from laya.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--max-seq-len 4096 --max-num-seqs=2", {"max_seq_len": 4096, "max_num_seqs": 2}),
        ("--max-seq-len auto", {"max_seq_len": "auto"}),
        ("--max-model-len 4096", {"max_seq_len": 4096}),
        ("-c 8192", {"max_seq_len": 8192, "max_num_seqs": 1}),
        ("-c 8192 -np 4", {"max_seq_len": 2048, "max_num_seqs": 4}),
        ("--parallel 4 --ctx-size 8192", {"max_seq_len": 2048, "max_num_seqs": 4}),
        ("-c 0", {"max_seq_len": "auto"}),
        ("-ctk q8_0 -ctv q8_0", {"kv_cache_dtype": "q8_0"}),
        ("--kv-cache-dtype q8_0", {"kv_cache_dtype": "q8_0"}),
        ("-t 4 -ngl 0", {"n_threads": 4, "gpu_layers": 0}),
        (
            "-ngl all -ncmoe 12 --gpus 0,2 -ts 3,1",
            {"gpu_layers": "all", "experts_on_cpu": 12, "gpus": [0, 2], "tensor_split": [3, 1]},
        ),
        ("--cpu-moe", {"experts_on_cpu": "all"}),
        ("--served-model-name a b --pinned", {"aliases": ["a", "b"], "pinned": True}),
        ("--no-mmap --enable-streaming false", {"mmap": False, "enable_streaming": False}),
        ("--ttl 5m", {"ttl": 300.0}),
        ("--ttl -1", {"ttl": -1.0}),
        ("--temp 0.7 --top-k 40 -n 64", {"defaults": {"temperature": 0.7, "top_k": 40, "max_tokens": 64}}),
        ("--stop 5", {"defaults": {"stop": "5"}}),
    ],
)
def test_flags_become_settings(line: str, expected: dict[str, Any]) -> None:
    settings = parse_engine_flags(line.split())
    assert settings == expected
    with_settings(Config(), settings).for_model("m")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-modl-len 5", "--max-modl-len is not a flag here. Did you mean --max-model-len?"),
        ("--max_seq_len 64", "--max_seq_len is not a flag here. Did you mean --max-seq-len?"),
        ("smollm2", "smollm2: expected a flag here"),
        ("--max-seq-len", "--max-seq-len needs a value, such as `--max-seq-len 8192`"),
        ("--max-seq-len --pinned", "--max-seq-len needs a value"),
        ("--max-seq-len many", "--max-seq-len: expected a whole number >= 16 or auto, got 'many'"),
        ("-c 64 -np 8", "-c 64 for 8 slots: expected a whole number >= 16 or auto, got 8"),
        ("-c 64 --max-seq-len 64", "-c and --max-seq-len both set the context"),
        ("-c many", "-c: expected a whole number of tokens, the total of all slots"),
        ("-ctk q8_0 -ctv q4_0", "keys and values have one type here"),
        ("-ctk fp8", "-ctk 'fp8': did you mean q8_0?"),
        ("-ngl most", "-ngl: expected a whole number >= 0 or all or auto, got 'most'"),
        ("--gpus 0,0", "--gpus [0, 0]: each GPU is named once"),
        ("-tp 2", "-tp: llama.cpp gives each GPU whole layers: write --gpus 0,1"),
        ("--gpu-memory-utilization 0.9", "--memory-budget 80%"),
        ("--gpu-memory-utilization=0.9", "--memory-budget 80%"),
        ("--api-key sk-secret", "laya config hash-key"),
        ("-b 512", "-b: the plan decides it"),
        ("--quantization awq", "--quantization 'awq': llama.cpp does not run it"),
        ("--engine remote", "--engine remote: a model under `models:` of config.yaml says that, with its url"),
        ("--engine command", "with its cmd"),
        ("--engine vllm --gpu-layers 3", "--gpu-layers is llama.cpp's; leave it out with --engine vllm. vLLM has all"),
        ("--engine vllm --no-mmap", "--no-mmap is llama.cpp's; leave it out with --engine vllm. vLLM has args"),
        ("--engine vllm --kv-cache-dtype fp88", "did you mean fp8?"),
        ("--split-mode row", "--split-mode: llama.cpp gives each GPU whole layers: write --gpus 0,1"),
        ("-mg 1", "-mg: write --gpus with the number of the GPU"),
        ("--preset", "--preset needs a name. There are article-a, article-b."),
        ("--preset --gpus 0", "--preset needs a name"),
        ("--preset ARTICLE-A", "Did you mean article-a?"),
        ("--preset article-a --preset article-b", "--preset article-a and another --preset: leave one out"),
        ("--lora nope.gguf", "--lora: there is no file 'nope.gguf'"),
    ],
)
def test_a_wrong_flag_is_one_sentence(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_engine_flags(line.split())
    assert expected in caught.value.message
    assert "secret" not in caught.value.message


def test_a_preset_is_for_vllm_unless_another_engine_is_said() -> None:
    article_b = parse_engine_flags(["--preset", "article-b", "--max-num-seqs", "2"])
    assert article_b == {
        "engine": "vllm", "max_seq_len": 4096, "max_num_seqs": 2, "enable_streaming": True,
        "memory_limit": 32 * 1024**3, "quantization": "awq",
    }  # fmt: skip
    assert parse_engine_flags(["--preset=article-a"])["gpu_memory_utilization"] == 0.9
    assert parse_engine_flags(["--preset", "article-a", "--engine", "llamacpp"]) == {
        "engine": "llamacpp", "max_seq_len": 4096, "max_num_seqs": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--preset article-c: there is no such preset\. Did you mean article-"):
        parse_engine_flags(["--preset", "article-c"])


def test_flags_of_vllm_are_its_own_and_reach_the_model() -> None:
    settings = parse_engine_flags(["--engine", "vllm", "-tp", "2", "--enforce-eager"])
    vllm = with_settings(Config(), settings, "m").for_model("m").vllm
    assert vllm is not None
    assert (vllm.tensor_parallel_size, vllm.enforce_eager) == (2, True)
    with pytest.raises(ConfigError, match=r"llama\.cpp gives each GPU whole layers"):
        parse_engine_flags(["-tp", "2"])


@given(
    st.lists(
        st.sampled_from([*FLAGS, *REFUSED, "1", "auto", "x", "--x", "-1", "a=b", "=", "", "[", "2000-13-01"]),
        max_size=6,
    )
)
def test_any_words_are_settings_or_a_config_error(argv: list[str]) -> None:
    try:
        settings = parse_engine_flags(argv)
    except ConfigError:
        return
    with_settings(Config(), settings, "m").for_model("m").asked()
