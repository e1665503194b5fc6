"""Models of other servers: TLS and key, names, failures and what becomes of each, failover, loops, pools."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from .live import Serving, model_state, plain, sdk, until
from .other_server import KEY, MODEL, USAGE, OtherServer

pytestmark = pytest.mark.engine
CONFIG = """
policy: round_robin
models:
  safe: {{engine: remote, url: {tls}, model: their-model, key_file: {key}, ca_file: {cert}}}
  safe-hangs: {{engine: remote, url: {tls}, model: their-model, key_file: {key}, ca_file: {cert},
               progress_timeout_s: 2}}
  misnamed: {{engine: remote, url: {misnamed}, model: their-model, key_file: {key}, ca_file: {cert}}}
  distrusted: {{engine: remote, url: {tls}, model: their-model, key_file: {key}}}
  plain: {{engine: remote, url: {one}, model: their-model, key_file: {key}, headers: {{x-team: blue}},
          progress_timeout_s: 2, cost: {{input_per_million: 2.5, output_per_million: 10, currency: EUR}}}}
{failing}  two: {{engine: remote, urls: [{one}, {two}], model: their-model, key_file: {key},
        progress_timeout_s: 2}}
  narrow: {{engine: remote, urls: [{one}, {two}], model: their-model, key_file: {key}, max_num_seqs: 1}}
  swapped: {{engine: remote, urls: [{swapped}, {two}], model: their-model, key_file: {key}, ca_file: {cert}}}
  away: {{engine: remote, url: "http://127.0.0.1:9/v1", connect_timeout_s: 2}}
  half-away: {{engine: remote, urls: ["http://127.0.0.1:9/v1", {two}], model: their-model, key_file: {key}}}
  loop: {{engine: remote, url: {door}, key_file: {key}}}
  odd: {{engine: remote, url: {one}, model: their-model, key_file: {key}, progress_timeout_s: 20}}
  endless: {{engine: remote, url: "{one_host}/endless/v1"}}
  slow: {{engine: remote, url: "{one_host}/slow/v1", connect_timeout_s: 1}}
  unnamed: {{engine: remote, url: {one}, key_file: {key}}}
  keyless: {{engine: remote, url: {one}, key_env: LAYA_TEST_NO_SUCH_KEY}}
  local: {{engine: command, cmd: "{python} {program} --port ${{PORT}} --model ${{MODEL}} --seconds-a-word 0.2",
          memory: 96MiB, max_num_seqs: 1, queue_size: 1}}
routing:
  pools: {{mixed: [local, safe]}}
  rules:
    - {{model: spilling, to: mixed, spillover: true}}
    - {{model: first-here, to: away, fallbacks: [safe]}}
"""
FAILING = "  fails-{mode}: {{engine: remote, url: {one}, model: their-model, key_file: {key}, progress_timeout_s: 2}}\n"
MODES = ("500", "401", "429", "redirect", "hang", "drip", "drop", "stall")
PROGRAM = Path(__file__).parent.parent / "engines" / "openai_program.py"
USER: Any = [{"role": "user", "content": "Hi"}]


def signed_by_itself(file: Path) -> tuple[Path, Path]:
    """A key with its certificate, and the certificate alone."""
    alone = file.with_suffix(".only.pem")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(file), "-out", str(alone)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    file.write_text(file.read_text() + alone.read_text())
    return file, alone


class Others:
    """The other servers, and the one that is tested."""

    def __init__(self, folder: Path) -> None:
        cert, self.cert = signed_by_itself(folder / "cert.pem")
        self.other_cert, _ = signed_by_itself(folder / "other.pem")
        self.tls, self.swapped = OtherServer(cert, base="/api/v1"), OtherServer(cert)
        self.one, self.two, self.door = OtherServer(), OtherServer(), OtherServer()
        self.key = folder / "key"
        self.key.write_text(KEY + "\n")
        self.serving: Serving

    def renew(self) -> None:
        for other in (self.tls, self.one, self.two):
            other.mode, other.raw, other.raw_again = "", b"", b""
            other.heads.clear()
            other.bodies.clear()


@pytest.fixture(scope="module")
def whole(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Others]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    others = Others(tmp_path_factory.mktemp("others"))
    failing = "".join(FAILING.format(mode=mode, one=others.one.url, key=others.key) for mode in MODES)
    config = CONFIG.format(
        failing=failing,
        tls=others.tls.url,
        misnamed=others.tls.url.replace("localhost", "127.0.0.1"),
        swapped=others.swapped.url,
        one=others.one.url,
        one_host=others.one.url.removesuffix("/v1"),
        two=others.two.url,
        key=others.key,
        cert=others.cert,
        door=others.door.url,
        python=sys.executable,
        program=PROGRAM,
    )
    others.serving = start_server(config=config)
    others.door.forward_to = f"{others.serving.url}/v1"
    yield others
    others.serving.stop()  # type: ignore[attr-defined]
    assert not any("Traceback" in line for line in others.serving.said)  # type: ignore[attr-defined]
    for other in (others.tls, others.swapped, others.one, others.two, others.door):
        other.stop()


@pytest.fixture
def others(whole: Others) -> Others:
    whole.renew()
    return whole


@pytest.fixture
def client(others: Others) -> openai.OpenAI:
    return sdk(others.serving)


@pytest.fixture
def odd(others: Others) -> str:
    """A model that nothing has failed yet: after a few faults in a row its address would get none for a while."""
    with plain(others.serving) as http:
        http.post("/admin/models/odd/unload").raise_for_status()
    return "odd"


def warm_up(others: Others, client: openai.OpenAI) -> None:
    """Both addresses are known, and a tenth of the requests may be tried a second time."""
    with plain(others.serving) as http:
        http.post("/admin/models/two/load").raise_for_status()
    for _ in range(24):
        client.chat.completions.create(model="plain", messages=USER)


def test_whole_and_streamed_through_tls_with_names_both_ways(others: Others, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="safe", messages=USER, max_completion_tokens=5)
    answer = raw.parse()
    assert (answer.choices[0].message.content, answer.model) == ("from afar", "safe")
    assert answer.usage is not None and answer.usage.total_tokens == USAGE["total_tokens"]
    assert raw.headers["x-laya-engine"] == "remote:safe"
    (head,), (body,) = others.tls.heads, others.tls.bodies
    assert head["authorization"] == f"Bearer {KEY}" and body["model"] == MODEL
    assert body == {"model": MODEL, "messages": USER, "max_completion_tokens": 5}
    events = list(client.chat.completions.create(model="safe", messages=USER, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "from afar"
    assert {event.model for event in events} == {"safe"}


def test_silence_is_heard_through_tls_too(others: Others, client: openai.OpenAI) -> None:
    others.tls.mode = "hang"
    with pytest.raises(openai.APIStatusError, match=r"has said nothing to a request for \d+ s"):
        client.chat.completions.create(model="safe-hangs", messages=USER)
    others.tls.mode = "stall"
    with pytest.raises(openai.APIError, match=r"has said nothing to a request for \d+ s"):
        list(client.chat.completions.create(model="safe-hangs", messages=USER, stream=True))


def test_certificate_that_nobody_signed_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="CERTIFICATE_VERIFY_FAILED"):
        client.chat.completions.create(model="distrusted", messages=USER)


def test_certificate_of_another_name_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match=r"certificate is not valid for '127\.0\.0\.1'"):
        client.chat.completions.create(model="misnamed", messages=USER)


def test_answers_carry_the_name_here_where_the_server_has_another_one(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="unnamed", messages=USER).model == "unnamed"


def test_headers_are_sent_and_no_byte_is_counted(others: Others, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="plain", messages=USER)
    assert others.one.heads[0]["x-team"] == "blue"
    state = model_state(others.serving, "plain")
    assert (state["state"], state["plan"]["devices"], state["pid"]) == ("ready", [], None)


@pytest.mark.parametrize(
    ("mode", "status", "words"),
    [
        ("500", 503, r"failed \(500\): its own trouble"),
        ("401", 502, r"refused Laya's key \(401\)"),
        ("429", 429, "takes no more requests now: too many"),
        ("redirect", 502, r"redirects \(302\), and redirects are not followed"),
        ("hang", 503, r"has said nothing to a request for \d+ s"),
        ("drip", 503, r"has said nothing to a request for \d+ s"),
        ("drop", 502, "broke off: it closed the connection"),
    ],
)
def test_each_failure_has_its_answer(others: Others, client: openai.OpenAI, mode: str, status: int, words: str) -> None:
    others.one.mode = mode
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        client.chat.completions.create(model=f"fails-{mode}", messages=USER)
    assert caught.value.status_code == status
    assert KEY not in str(caught.value)
    if mode == "429":
        assert caught.value.response.headers["retry-after"] == "17"


@pytest.mark.parametrize("mode", ["500", "401", "429", "redirect", "hang"])
def test_what_one_address_fails_another_serves(others: Others, client: openai.OpenAI, mode: str) -> None:
    warm_up(others, client)
    others.one.mode = mode
    for _ in range(2):
        assert client.chat.completions.create(model="two", messages=USER).choices[0].message.content == "from afar"


def http(body: bytes, status: str = "200 OK", *lines: str) -> bytes:
    """An answer as it is on the wire."""
    head = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


ERROR = b'{"error": {"message": "its own trouble"}}'
LONG = b"This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."
WHOLE = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]}'
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n'
NO_ANSWERS = {
    "page": (http(b"<html>Please log in</html>"), 502, "answers with what is no answer: '<html>Please log in"),
    "nothing": (http(b""), 502, "answers with what is no answer: ''"),
    "list": (http(b"[1, 2]"), 502, "answers with what is no answer"),
    "no choices": (http(b'{"id": "x", "model": "y"}'), 502, "answers with what is no answer"),
    "deep": (http(b'{"choices": ' + b"[" * 99999 + b"]" * 99999 + b"}"), 502, "answers with what is no answer"),
    "error with 200": (http(ERROR), 503, "failed: its own trouble"),
    "zip": (http(gzip.compress(b"{}"), "200 OK", "content-encoding: gzip"), 502, r"compresses its answer \(gzip\)"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 502, "answers 204, which is no answer"),
    "201": (http(b"{}", "201 Created"), 502, "answers 201, which is no answer"),
    "402": (http(ERROR, "402 Payment Required"), 502, r"does not take the request \(402\): its own trouble"),
    "cut short": (http(WHOLE[:15]) + WHOLE[15:], 502, "answers with what is no answer"),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-ty", 502, "broke off: it closed the connection"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", 502, "broke off: it sent what is not HTTP"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_the_servers_fault(
    others: Others, client: openai.OpenAI, odd: str, name: str, stream: bool
) -> None:
    others.one.mode, (others.one.raw, status, words) = "raw", NO_ANSWERS[name]
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        client.chat.completions.create(model=odd, messages=USER, stream=stream)
    assert caught.value.status_code == status


def test_error_event_with_200_is_a_failure(others: Others, client: openai.OpenAI, odd: str) -> None:
    others.one.mode, others.one.raw = "raw", EVENTS + b"data: " + ERROR + b"\n\n"
    with pytest.raises(openai.APIStatusError, match="broke off its answer: its own trouble") as caught:
        client.chat.completions.create(model=odd, messages=USER, stream=True)
    assert caught.value.status_code == 502
    others.one.raw = EVENTS + TOKEN + b"data: " + ERROR + b"\n\n"
    events = client.chat.completions.create(model=odd, messages=USER, stream=True)
    assert next(events).choices[0].delta.content == "x"
    with pytest.raises(openai.APIError, match="broke off its answer: its own trouble"):
        next(events)


def test_what_is_no_answer_another_address_serves(others: Others, client: openai.OpenAI) -> None:
    warm_up(others, client)
    others.one.mode, others.one.raw = "raw", http(b"<html>Please log in</html>")
    for _ in range(2):
        assert client.chat.completions.create(model="two", messages=USER).choices[0].message.content == "from afar"
        assert [*client.chat.completions.create(model="two", messages=USER, stream=True)]
    others.one.raw = EVENTS + b"data: " + ERROR + b"\n\n"
    assert [*client.chat.completions.create(model="two", messages=USER, stream=True)]


@pytest.mark.parametrize(
    ("raw", "words", "code"),
    [
        (http(b'{"detail": "no such field"}', "422 X"), "no such field", "invalid_request"),
        (
            http(b'{"detail": [{"loc": ["body", "top_k"], "msg": "too large"}]}', "422 X"),
            "body.top_k: too large",
            "invalid_request",
        ),
        (http(b'{"object": "error", "message": "too many images"}', "400 X"), "too many images", "invalid_request"),
        (http(b"plain words", "400 X"), "plain words", "invalid_request"),
        (http(b'{"error": {"message": "%b", "code": 400}}' % LONG, "400 X"), "4096 tokens", "context_length_exceeded"),
        (
            http(b'{"error": {"message": "long", "code": "context_length_exceeded"}}', "400 X"),
            "long",
            "context_length_exceeded",
        ),
        (
            http(b'{"error": "the key %b is odd"}' % KEY.encode(), "400 X"),
            r"the key \(the key\) is odd",
            "invalid_request",
        ),
    ],
)
def test_words_of_a_refusal_are_found_however_they_are_put(
    others: Others, client: openai.OpenAI, odd: str, raw: bytes, words: str, code: str
) -> None:
    others.one.mode, others.one.raw = "raw", raw
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(model=odd, messages=USER)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("line", "told_s"),
    [
        ("retry-after: 12.5", "12"),
        ("retry-after: Fri, 31 Dec 2999 23:59:59 GMT", "86400"),
        ("retry-after-ms: 4200", "4"),
        ("retry-after: " + "9" * 400, "1"),
        ("retry-after: soon", "1"),
        ("retry-after: -5", "1"),
    ],
)
def test_wait_is_told_however_it_is_put(
    others: Others, client: openai.OpenAI, odd: str, line: str, told_s: str
) -> None:
    others.one.mode, others.one.raw = "raw", http(ERROR, "429 Too Many", line)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=odd, messages=USER)
    assert caught.value.response.headers["retry-after"] == told_s


@pytest.mark.parametrize(
    ("raw", "again", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536, "the head of its answer has no end"),
        (b"HTTP/1.1 200 OK\r\n", b"x-more: y\r\n" * 4096, "the head of its answer has no end"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"y" * 1048576, "answers with more than 134217728 bytes"),
        (b"HTTP/1.1 500 X\r\n\r\n", b"y" * 1048576, r"failed \(500\): yyy"),
    ],
)
def test_answer_without_an_end_does_not_fill_the_memory(
    others: Others, client: openai.OpenAI, odd: str, raw: bytes, again: bytes, words: str
) -> None:
    others.one.mode, others.one.raw, others.one.raw_again = "raw", raw, again
    with pytest.raises(openai.APIStatusError, match=words):
        client.chat.completions.create(model=odd, messages=USER)


def test_list_of_models_without_an_end_is_not_read(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="endless", messages=USER).model == "endless"
    with pytest.raises(openai.APIStatusError, match="no answer within 1 s"):
        client.chat.completions.create(model="slow", messages=USER)


def test_answer_whole_where_a_stream_was_asked_for_is_told(others: Others, client: openai.OpenAI, odd: str) -> None:
    answer = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}], "usage": [1]}'
    others.one.mode, others.one.raw = "raw", http(answer)
    with pytest.raises(openai.APIStatusError, match="answers whole where it was asked for a stream"):
        client.chat.completions.create(model=odd, messages=USER, stream=True)
    assert client.chat.completions.create(model=odd, messages=USER).choices[0].message.content == "x"


def test_wrong_requests_are_the_clients_and_leave_the_address_in_use(others: Others, client: openai.OpenAI) -> None:
    others.tls.mode = "400"
    for _ in range(8):
        with pytest.raises(openai.BadRequestError, match="its own trouble"):
            client.chat.completions.create(model="safe", messages=USER)
    others.tls.mode = ""
    assert client.chat.completions.create(model="safe", messages=USER).model == "safe"


@pytest.mark.parametrize("mode", ["drop", "stall"])
def test_stream_that_breaks_off_ends_with_an_error_and_is_not_begun_again(
    others: Others, client: openai.OpenAI, mode: str
) -> None:
    others.one.mode = mode
    stream = client.chat.completions.create(model=f"fails-{mode}", messages=USER, stream=True)
    assert next(stream).choices[0].delta.content == "from"
    with pytest.raises(openai.APIError):
        next(stream)
    assert len(others.one.bodies) == 1


def test_whole_answer_that_breaks_off_is_asked_of_the_other_address(others: Others, client: openai.OpenAI) -> None:
    warm_up(others, client)
    others.one.mode = "drop"
    long: Any = [{"role": "user", "content": "Hi " * 40000}]  # more than is kept of each request without being counted
    for messages in (USER, USER, long, long):
        assert client.chat.completions.create(model="two", messages=messages).choices[0].message.content == "from afar"


def test_address_that_is_not_there_is_told_and_the_next_one_serves(others: Others, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="cannot be reached"):
        client.chat.completions.create(model="away", messages=USER)
    assert client.chat.completions.create(model="half-away", messages=USER).model == "half-away"


def test_address_whose_certificate_is_another_one_is_left_aside(others: Others, client: openai.OpenAI) -> None:
    with plain(others.serving) as http:
        http.post("/admin/models/swapped/load").raise_for_status()
        others.swapped.context.load_cert_chain(others.other_cert)
        for _ in range(16):
            assert client.chat.completions.create(model="swapped", messages=USER).model == "swapped"
        events = http.get("/admin/events").json()["events"]
    assert "breaker_open" in {event["kind"] for event in events if "'swapped#1'" in event["text"]}


def test_rule_lets_a_remote_stand_in(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="first-here", messages=USER).model == "safe"


def outcomes_of_four(client: openai.OpenAI, model: str) -> list[str]:
    """Asked at once: the models that answered, and the codes of refusals."""

    def ask(_: int) -> str:
        try:
            return client.chat.completions.create(model=model, messages=USER).model
        except openai.APIStatusError as error:
            return str(error.code)

    with ThreadPoolExecutor(4) as four:
        return sorted(four.map(ask, range(4)))


def test_pool_goes_to_another_server_only_where_a_rule_says_so(others: Others, client: openai.OpenAI) -> None:
    for model in ("local", "safe"):
        client.chat.completions.create(model=model, messages=USER)
    others.renew()
    assert outcomes_of_four(client, "mixed") == ["local", "local", "queue_full", "queue_full"]
    assert not others.tls.bodies
    assert outcomes_of_four(client, "spilling") == ["local", "safe", "safe", "safe"]
    assert client.chat.completions.create(model="spilling", messages=USER).model == "local"
    with plain(others.serving) as http:
        told = http.get("/admin/route/explain", params={"model": "spilling"}).json()
    assert (told["models"], told["spills"]) == (["mixed", "safe"], True)


def test_each_address_gets_no_more_at_once_than_it_may(others: Others, client: openai.OpenAI) -> None:
    with plain(others.serving) as http:
        http.post("/admin/models/narrow/load").raise_for_status()
    for other in (others.one, others.two):
        other.mode = "gate"
    with ThreadPoolExecutor(6) as six:
        asked = [six.submit(client.chat.completions.create, model="narrow", messages=USER) for _ in range(6)]
        until(lambda: model_state(others.serving, "narrow")["queued"] == 4)
        assert (others.one.n_at_gate, others.two.n_at_gate) == (1, 1)
        for other in (others.one, others.two):
            other.gate.set()
        assert {each.result().model for each in asked} == {"narrow"}
    assert (others.one.most_at_gate, others.two.most_at_gate) == (1, 1)


def test_costs_are_told_beside_usage_and_before(others: Others, client: openai.OpenAI) -> None:
    with plain(others.serving) as http:

        def used(model: str) -> tuple[int, int, float]:
            """Tokens of prompts and answers, and euros, so far: the store is older than this server."""
            rows = http.get("/admin/usage", params={"by": "model"}).json()["usage"]
            row = next((row for row in rows if row["model"] == model), None)
            if row is None:
                return 0, 0, 0.0
            return row["prompt_tokens"], row["generated_tokens"], row["costs"].get("EUR", 0.0)

        before, free = used("plain"), used("safe")
        client.chat.completions.create(model="plain", messages=USER)
        client.chat.completions.create(model="safe", messages=USER)
        until(lambda: used("plain")[1] > before[1] and used("safe")[1] > free[1])
        n_in, n_out, euros = (now - then for now, then in zip(used("plain"), before, strict=True))
        assert (n_in, n_out) == (USAGE["prompt_tokens"], USAGE["completion_tokens"])
        assert euros == pytest.approx((2.5 * n_in + 10 * n_out) / 1_000_000)
        assert used("safe")[2] == 0.0
        told = http.get("/admin/route/explain", params={"model": "plain"}).json()
    assert told["tried"][0]["candidates"][0]["cost"] == "2.5 in, 10 out EUR"


def test_loop_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="came back to the server that sent it out"):
        client.chat.completions.create(model="loop", messages=USER)


def test_key_that_is_not_there_is_told_by_its_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the environment has no LAYA_TEST_NO_SUCH_KEY") as caught:
        client.chat.completions.create(model="keyless", messages=USER)
    assert (caught.value.status_code, caught.value.code) == (503, "model_misconfigured")


def test_key_is_in_no_state_and_no_log(others: Others, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="plain", messages=USER)
    with plain(others.serving) as http:
        for path in ("/admin/state", "/admin/models/plain/logs", "/admin/events", "/metrics"):
            assert KEY not in http.get(path).text
