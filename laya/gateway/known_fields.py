"""Owns: what becomes of a chat's or completion's field that llama.cpp does not do: taken as a hint, or refused by name.

A hint may be left undone and the answer is still what was asked for. What would make another answer is not left out in
silence. Knows names and small values; other engines are sent what the client said and judge for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from laya.errors import InvalidRequest, LayaError, NotSupported, nearest

# about quality of service, bookkeeping and how much is thought; by who sends them
HINTS = frozenset(
    (
        # OpenAI's clients
        "metadata", "moderation", "prediction", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort",
        "safety_identifier", "service_tier", "store", "verbosity", "audio", "extra_headers", "timeout", "drop_params",
        # clients of routers and of other servers
        "cache_salt", "chat_id", "draft_model", "features", "id", "include", "include_reasoning", "models", "num_ctx",
        "options", "plugins", "preset", "priority", "provider", "reasoning", "reasoning_split", "request_id", "route",
        "session_id", "thinking", "trace", "transforms", "ttl", "usage", "tool_ids", "filter_ids", "files",
        "background_tasks", "variables", "title", "safe_prompt",
    )
)  # fmt: skip
# what llama.cpp reads nothing of; it would parse them all the same, however large
UNREAD_FIELDS = (*sorted(HINTS - {"reasoning_effort"}), "keep_alive")
# of llama.cpp beyond those of EngineFields
OF_LLAMACPP = frozenset(
    (
        "adaptive_decay", "adaptive_target", "add_generation_prompt", "backend_sampling", "chat_format",
        "chat_template_kwargs", "continue_final_message", "dynatemp_exponent", "dynatemp_range", "generation_prompt",
        "grammar_type", "ignore_eos", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "parse_tool_calls",
        "parallel_tool_calls", "post_sampling_probs", "preserved_tokens", "reasoning_budget_message",
        "reasoning_budget_tokens", "reasoning_control", "reasoning_format", "reasoning_in_content", "response_fields",
        "return_tokens", "sse_ping_interval", "thinking_budget_tokens", "thinking_forced_open", "top_n_sigma",
        "verbose",
    )
)  # fmt: skip
_USE_FORMAT = "use 'response_format'"
_NOT_DONE = {
    "add_special_tokens": "the chat template decides",
    "allowed_token_ids": "use 'logit_bias' or 'grammar'",
    "bad_words": "use 'logit_bias'",
    "chat_template": "it is set in the config, with 'chat_template'",
    "documents": "put them into the messages",
    "enable_thinking": "use 'chat_template_kwargs': {\"enable_thinking\": ...}",
    "format": _USE_FORMAT,
    "guided_choice": _USE_FORMAT,
    "guided_grammar": "use 'grammar'",
    "guided_json": _USE_FORMAT,
    "guided_regex": "use 'response_format' with a 'pattern'",
    "include_stop_str_in_output": "the answer ends before it",
    "length_penalty": "there is no beam search",
    "logits_processors": "use 'logit_bias'",
    "min_tokens": "use 'ignore_eos' with 'max_tokens'",
    "modalities": "answers are text",
    "prompt_logprobs": "engines here give no logprobs of the prompt",
    "repetition_penalty": "use 'repeat_penalty'",
    "return_tokens_as_token_ids": "use 'return_tokens'",
    "skip_special_tokens": "special tokens are left out",
    "spaces_between_special_tokens": "special tokens are left out",
    "stop_token_ids": "use 'stop'",
    "structured_outputs": _USE_FORMAT,
    "system": "use a message with the role 'system'",
    "think": "use 'chat_template_kwargs': {\"enable_thinking\": ...}",
    "truncate_prompt_tokens": "set `overflow: trim` of the model in the config",
    "use_beam_search": "there is no beam search",
    "web_search_options": "this server searches nothing; offer a tool of your own",
}
_OF_COMPLETIONS = {
    "messages": "use /v1/chat/completions",
    "response_format": "use 'json_schema', or /v1/chat/completions",
    "tool_choice": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
}
_OF_CHATS = {
    "best_of": "use 'n'",
    "echo": "use 'continue_final_message'",
    "prompt": "use 'messages'",
    "suffix": "use /v1/completions",
}
# values that ask for what is done anyway, beside null, false, 0 and what is empty
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (-1,),
}
_SMALL_BYTES = 64
_NOTHING = (b"null", b"false")
_FALSE_SAYS_SOMETHING = frozenset(("add_special_tokens", "enable_thinking", "skip_special_tokens", "think"))


def not_done(fields: Mapping[str, msgspec.Raw], typed: tuple[str, ...], *, is_chat: bool) -> LayaError | None:
    """What to answer where an engine of llama.cpp is to serve these fields. typed: those that Laya reads itself."""
    refused = _NOT_DONE | (_OF_CHATS if is_chat else _OF_COMPLETIONS)
    for name, raw in fields.items():
        if name in refused:
            if not _asks_for_nothing(name, raw):
                return NotSupported(f"'{name}' is not supported here: {refused[name]}.", param=name)
        elif name not in typed and name not in HINTS and name not in OF_LLAMACPP and bytes(raw) != b"null":
            close = nearest(name, (*typed, *OF_LLAMACPP, *HINTS)) or nearest(name.lower(), typed)
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            hint = f" Did you mean '{close}'?" if close else ""
            return InvalidRequest(f"'{name[:60]}' is not a field of {path}.{hint}", param=name[:60])
    return None


# of other servers that rank or embed, where the answer is what was asked for without
_OF_READERS = frozenset(
    ("embd_normalize", "instruction", "input_type", "max_chunks_per_doc", "return_documents", "task")
)


def not_read(fields: Mapping[str, msgspec.Raw], typed: tuple[str, ...], path: str) -> LayaError | None:
    """The same of what is read and not answered: embeddings and ranks."""
    for name, raw in fields.items():
        if name not in typed and name not in HINTS and name not in _OF_READERS and bytes(raw) not in _NOTHING:
            close = nearest(name, (*typed, *_OF_READERS))
            hint = f" Did you mean '{close}'?" if close else ""
            return InvalidRequest(f"'{name[:60]}' is not a field of {path}.{hint}", param=name[:60])
    return None


def _asks_for_nothing(name: str, raw: msgspec.Raw) -> bool:
    if len(memoryview(raw)) > _SMALL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    if not value:
        return value is None or name not in _FALSE_SAYS_SOMETHING
    return value in _DONE_ANYWAY.get(name, ())
