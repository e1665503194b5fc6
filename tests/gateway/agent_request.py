"""The first request of a coding agent, as they are sent: pages of rules, the project's tree, thirty tools, one wish."""

from __future__ import annotations

from typing import Any

VERBS = ("read", "write", "edit", "search", "list", "run", "fetch", "review", "plan", "undo")
THINGS = ("file", "notebook", "branch")
RULES = (
    "Read a file whole before you change it, and never guess what a function does from its name alone.",
    "Keep each change as small as the task allows; do not reformat lines that you did not have to touch.",
    "Run the tests that cover what you changed, and say plainly which of them failed and why.",
    "Ask before you delete anything that is not under version control, and before you push anywhere.",
    "Prefer the libraries that the project has already; a new dependency needs a reason in one sentence.",
    "Paths are relative to the project's root unless a tool says otherwise; quote those that hold spaces.",
    "When a command takes longer than a minute, run it in the background and look at its output now and then.",
    "Never write secrets, tokens or keys into a file, a commit message or a log, not even as an example.",
    "Answer in the language of the question, without preamble, and show code only where it is asked for.",
    "If two instructions contradict each other, follow the one of the person and tell that you did.",
)
WISH = "The tests of the parser fail since yesterday. Find out why and mend it."


def system_prompt(n_rules: int = 370) -> str:
    """About 36 tokens a rule."""
    rules = (f"{number + 1}. {RULES[number % len(RULES)]} (section {number // 7})" for number in range(n_rules))
    tree = (f"src/module_{number:03}/handler_{number % 7}.py" for number in range(120))
    return "\n".join(["You are a coding agent in somebody's terminal.", *rules, "# Files of the project", *tree])


def _schema(verb: str, thing: str) -> dict[str, Any]:
    """Nested objects, lists, choices and bounds, as tools have them."""
    span = {
        "type": "object",
        "description": f"The part of the {thing} to {verb}; the whole of it where this is left out.",
        "properties": {
            "start_line": {"type": "integer", "minimum": 1, "description": "The first line, counted from one."},
            "end_line": {"type": "integer", "minimum": 1, "description": "The last line, which is included."},
        },
        "required": ["start_line"],
        "additionalProperties": False,
    }
    step = {
        "type": "object",
        "properties": {
            "target": {"type": "string", "description": f"The path or name of the {thing}."},
            "span": span,
            "mode": {"type": "string", "enum": ["strict", "lenient", "dry_run"], "default": "strict"},
            "labels": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["target"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": step, "minItems": 1, "maxItems": 20},
            "timeout_s": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds until it is given up."},
            "reason": {"type": "string", "description": "One sentence that the person will see."},
        },
        "required": ["steps", "reason"],
        "additionalProperties": False,
    }


def _described() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (f"{verb}_{thing}", f"{verb.capitalize()} one {thing} or several of them. {RULES[index % len(RULES)]}",
         _schema(verb, thing))
        for index, (verb, thing) in enumerate((verb, thing) for verb in VERBS for thing in THINGS)
    ]  # fmt: skip


def chat_request() -> dict[str, Any]:
    """As OpenAI's clients send it."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, text, schema in _described()
    ]
    messages = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": WISH}]
    return {"messages": messages, "tools": tools}


def message_request() -> dict[str, Any]:
    """The same as Anthropic's clients send it."""
    tools = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in _described()]
    system = [{"type": "text", "text": system_prompt(), "cache_control": {"type": "ephemeral"}}]
    return {"system": system, "messages": [{"role": "user", "content": WISH}], "tools": tools}
