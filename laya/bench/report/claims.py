"""Owns: the claims of the two articles in our words, one table: what was said, its layer, what measures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from laya.bench.report import measure_false as untrue
from laya.bench.report import measure_memory as memory
from laya.bench.report import measure_speed as speed
from laya.bench.report.bench_desk import Desk
from laya.bench.report.finding import Finding

Measure = Callable[[Desk], Finding]
PLAN, KERNEL, ENGINE, SOCKET, WHOLE = "plan, before a load", "one call", "engine", "socket to socket", "the program"


class Claim(NamedTuple):
    """article: its figure, with its unit; - where it is no figure."""

    id: str
    says: str
    article: str
    layer: str
    measure: Measure


def tried(what: str, *nodes: str) -> Measure:
    """A row that is no figure but a behaviour: the tests that try it on real programs."""

    def measure(desk: Desk) -> Finding:
        passed = desk.tests(*nodes)
        command = f"python -m pytest {' '.join(nodes)}"
        return Finding(verdict="holds", here=f"{what} ({passed})", load="as in the tests", command=command)

    return measure


CLAIMS = (
    Claim("A1", "Expert routing for 128 tokens against native operators", "0.27-0.35 ms, 3.3x", KERNEL, speed.fused),
    Claim(
        "A2",
        "LayaRouter.from_pretrained on a checkpoint, profiled alone over 100 runs",
        "-",
        KERNEL,
        tried("the snippet runs", "tests/modeling/test_checkpoint.py::test_articles_snippet_runs"),
    ),
    Claim("A3", "Linear, expert embeddings, softmax, top-k", "-", KERNEL, speed.folded),
    Claim("A4", "Embeddings kept close, softmax and top-k fused, tokens batched", "three gains", KERNEL, speed.shares),
    Claim("A5", "Eight experts are used evenly on mixed topics", "10-15 % each", ENGINE, speed.balance),
    Claim("A6", "First token after a prompt of 256 tokens, and its steps", "850 ms", SOCKET, speed.latency),
    Claim("A7", "Memory of FP16, 8 and 4 bits", "24, 13, 9 GB", PLAN, memory.precisions),
    Claim("A8", "52 GB of weights did not fit 24 GB", "52 GB", PLAN, memory.refused_before_read),
    Claim("A9", "KV = 2 x batch x length x layers x heads x width x bytes", "6-8 GB at 4096", PLAN, memory.kv_exact),
    Claim("A10", "A mixed run filled RAM and card", "60 of 64 GB", PLAN, memory.both_accounts),
    Claim("A11", "Eight sessions together against one after the other (vLLM)", "4x", SOCKET, speed.sessions),
    Claim(
        "A12",
        "Length, share of the card and sequences were found by hand",
        "8192 -> 2048",
        PLAN,
        memory.found_by_itself,
    ),
    Claim("A13", "Out of memory after dozens of tokens: the KV cache was not planned", "-", SOCKET, speed.long_run),
    Claim("A14", "Layers split between a 16 GB card and RAM", "4-6 tok/s", PLAN, memory.split),
    Claim(
        "A15",
        "The process died and took the conversation along",
        "-",
        WHOLE,
        tried(
            "a conversation outlives kill -9 of engine and server",
            "tests/gateway/test_responses_engine.py::test_conversation_outlives_kill_of_engine_and_server",
        ),
    ),
    Claim(
        "A16",
        "Smoke test; kernels took 40 minutes to compile",
        "40 min",
        WHOLE,
        tried(
            "`laya smoke` passes with nothing compiled",
            "tests/cli/test_smoke.py::test_smoke_passes_on_a_server_that_has_loaded_nothing_yet",
        ),
    ),
    Claim("A17", "Eight sessions stable all day", "0 failures", SOCKET, speed.soak),
    Claim(
        "A18",
        "Clone, install, put weights into models, run a smoke test script",
        "-",
        WHOLE,
        tried(
            "tools/smoke_test.py works",
            "tests/cli/test_smoke.py::test_smoke_ticks_what_it_tries_and_skips_what_is_not_there",
        ),
    ),
    Claim(
        "A19",
        "Look before you download",
        "52 GB, 80 GB of disk",
        WHOLE,
        tried(
            "verdict and disk are told before the first byte",
            "tests/models/test_cli.py::test_pull_says_verdict_and_disk_before_the_bytes",
            "tests/models/test_disk.py::test_pull_too_big_for_the_disk_is_refused_before_the_bytes",
        ),
    ),
    Claim("A20", "Decoding waits for memory: more windows, slower each", "-", SOCKET, speed.bandwidth),
    Claim(
        "A21",
        "CPU at 90 %, the mouse dropped frames",
        "90 %",
        WHOLE,
        tried(
            "a 10 ms ticker and a shell stay smooth under load",
            "tests/chaos/test_mouse.py::test_ticker_and_shell_stay_smooth_while_models_load_and_answers_stream",
        ),
    ),
    Claim(
        "A22",
        "A big swap saves the process, or keep swap low",
        "-",
        WHOLE,
        tried(
            "swap saves no engine, a ceiling ends it alone",
            "tests/chaos/test_swap.py::test_swap_saves_no_engine_and_a_ceiling_ends_it_alone",
        ),
    ),
    Claim(
        "A23",
        "An automatic mode trims to the memory at hand",
        "-",
        WHOLE,
        tried(
            "old turns go, the system prompt stays, a header says so",
            "tests/gateway/test_trim.py::test_long_chat_is_answered_without_its_oldest_turns",
        ),
    ),
    Claim(
        "A24",
        "Test, log and change the router",
        "-",
        KERNEL,
        tried(
            "a router of one's own is trained and comes back",
            "tests/modeling/test_custom_router.py::test_example_trains_and_its_model_comes_back",
        ),
    ),
    Claim("A25", "Judge by the whole chain and by your own task", "-", SOCKET, speed.end_to_end),
    Claim("B1", "Request routing, mean of 10 000 with 8 threads", "0.302 ms", KERNEL, speed.request_router),
    Claim("B2", "Bit operations and one look-up, no lock, no disk, no network", "-", KERNEL, speed.no_lock),
    Claim("B3", "Defaults of 8 sequences x 32768 tokens froze a machine of 64 GB", "10 -> 60 GB", PLAN, memory.froze),
    Claim("B4", "A smaller configuration took less", "60 -> 18 GB", PLAN, memory.smaller_config),
    Claim("B5", "7B in FP16: KV cache by length and sequences", "512 KB, 2 GB, 16 GB", PLAN, memory.kv_table),
    Claim("B6", "AWQ in 4 bits", "14 -> 7 GB", PLAN, memory.awq_size),
    Claim("B7", "Budget = weights x 1.5 to 2", "1.5-2x", PLAN, memory.rule_of_thumb),
    Claim(
        "B8",
        "MemoryMax under systemd",
        "32 GB",
        WHOLE,
        tried(
            "the unit holds the service as the guard would",
            "tests/cli/test_service.py::test_unit_holds_the_service_as_the_guard_would",
        ),
    ),
    Claim(
        "B9",
        "Need at two sequences above 80 % of memory: other hardware or a smaller model",
        "80 %",
        PLAN,
        memory.verdict_rule,
    ),
    Claim("B10", "Ask of every figure: which layer, what load, what hardware", "-", WHOLE, speed.figures_named),
    Claim(
        "B11",
        "Check a stand-in model with your own tasks",
        "-",
        ENGINE,
        tried(
            "two models answer a task set, won and lost are counted",
            "tests/quantization/test_eval.py::test_two_models_are_compared_by_api",
        ),
    ),
    Claim(
        "B12",
        "Compatible with OpenAI's API",
        "-",
        SOCKET,
        tried(
            "OpenAI's SDK for JavaScript and the docs' programs for Python work",
            "tests/gateway/test_openai_js.py::test_example",
            "tests/docs/test_commands.py::test_programs_work_as_pasted_one_after_another",
        ),
    ),
    Claim(
        "B13",
        "git clone, pip install -r requirements.txt, benchmark_router.py",
        "four lines",
        WHOLE,
        speed.four_lines,
    ),
    Claim(
        "B14",
        "Several long documents summarised at once were the trigger",
        "-",
        WHOLE,
        tried(
            "the folder is summarised under a ceiling",
            "tests/chaos/test_limits.py::test_folder_of_long_files_is_summarized_to_the_end",
        ),
    ),
    Claim("B15", "One or two sequences are enough for one person", "1-2", PLAN, memory.safe_defaults),
    Claim("B16", "First a smaller model, then hardware", "-", PLAN, memory.smaller_first),
    Claim("F1", "52 GB of FP16 weights need 26 GB", "26 GB", PLAN, untrue.half_the_bytes),
    Claim("F2", "Streaming frees KV memory", "-", PLAN, untrue.streaming),
    Claim("F3", "Quantized weights shrink the KV cache", "-", PLAN, untrue.quantized_cache),
    Claim("F4", "The KV cache grows faster than the context", "-", PLAN, untrue.linear),
    Claim("F5", "The KV cache counts all heads", "-", PLAN, untrue.all_heads),
    Claim("F6", "All experts must sit in the card's memory", "-", PLAN, untrue.experts_in_ram),
    Claim("F7", "A request router makes tokens faster", "-", SOCKET, untrue.faster_tokens),
)
