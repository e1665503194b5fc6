"""Owns: sets of tasks (JSONL) and whether an answer is right. Knows no model: text in, right or wrong out.

One line an item: `{"id", "kind", "prompt", ...}`. kinds:

    exact        "answer": text or a list of them; equal but for case, spaces and the last full stop
    contains     "answer": text or a list; one of them is in what was answered, in any case
    regex        "pattern": found in what was answered
    choice       "choices": [...], "answer": one of them
    json_schema  "schema": the answer is JSON of it; "answer": members that it must have besides, may be left out
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import jsonschema
import msgspec

from laya.errors import ConfigError, nearest
from laya.quantization.given import given_text

Kind = Literal["exact", "contains", "regex", "choice", "json_schema"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SETS = ("basic",)
DEFAULT_MAX_TOKENS = 24
LETTERS = "ABCDEFGHIJ"


class Task(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item of a set; see the module."""

    id: str
    kind: Kind
    prompt: str
    answer: Any = None
    pattern: str | None = None
    choices: list[str] = []
    schema: dict[str, Any] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_MAX_TOKENS

    @property
    def asked(self) -> str:
        """The prompt as a server is asked: with its choices by letters."""
        if self.kind != "choice":
            return self.prompt
        options = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False))
        return f"{self.prompt}\n{options}\nAnswer with the letter only."


def load_set(name: str) -> list[Task]:
    """Items of a built-in set or of a file. Raises ConfigError naming the line and what is wrong with it."""
    if name in SETS:
        raw = (files("laya.quantization") / "sets" / f"{name}.jsonl").read_text(encoding="utf-8")
    elif Path(name).is_file():
        raw = given_text("--set", name)
    else:
        close = nearest(name, SETS)
        hint = f"did you mean {close}?" if close else f"built in: {', '.join(SETS)}."
        raise ConfigError(f"--set {name}: there is no such file and no such set; {hint}", param="set")
    tasks: list[Task] = []
    seen: set[str] = set()
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = msgspec.json.decode(line, type=Task)
            _check(task)
        except (msgspec.DecodeError, ValueError, jsonschema.SchemaError, re.error) as error:
            raise ConfigError(f"--set {name}, line {number}: {getattr(error, 'message', error)}", param="set") from None
        if task.id in seen:
            raise ConfigError(f"--set {name}, line {number}: the id {task.id!r} is there twice", param="set")
        seen.add(task.id)
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"--set {name}: there is no item in it", param="set")
    return tasks


def _check(task: Task) -> None:
    """Raises ValueError where an item lacks what its kind needs."""
    if task.kind in ("exact", "contains") and not _answers(task):
        raise ValueError(f"{task.kind} needs an answer: text, or a list of texts")
    if task.kind == "regex":
        if not task.pattern:
            raise ValueError("regex needs a pattern")
        re.compile(task.pattern)
    if task.kind == "choice" and (not 2 <= len(task.choices) <= len(LETTERS) or task.answer not in task.choices):
        raise ValueError(f"choice needs 2 to {len(LETTERS)} choices, and an answer that is one of them")
    if task.kind == "json_schema":
        if task.schema is None:
            raise ValueError("json_schema needs a schema")
        jsonschema.validators.validator_for(task.schema).check_schema(task.schema)
        if far := [ref for ref in _references(task.schema) if not ref.startswith("#")]:
            raise ValueError(f"a schema refers to itself only (#/...), not to {far[0]}")


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (value for name, value in schema.items() if name == "$ref" and isinstance(value, str))
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _references(each)


def is_right(task: Task, answer: str) -> bool:
    """Whether text that a model wrote is right."""
    if task.kind == "exact":
        return normal(answer) in {normal(each) for each in _answers(task)}
    if task.kind == "contains":
        return any(each.casefold() in answer.casefold() for each in _answers(task))
    if task.kind == "regex":
        return re.search(task.pattern or "", answer) is not None
    if task.kind == "choice":
        return bool(chosen(task, answer) == task.answer)
    return _is_of_schema(task, answer)


def chosen(task: Task, answer: str) -> str | None:
    """The choice that an answer names, by its letter at the start or by being the only one in the text."""
    if (match := re.match(r"\W*([A-J])(?![\w'])", answer)) and LETTERS.index(match[1]) < len(task.choices):
        return task.choices[LETTERS.index(match[1])]
    named = [choice for choice in task.choices if _is_word(choice.strip(), answer)]
    return named[0] if len(named) == 1 else None


def normal(text: str) -> str:
    """What is compared: case, spaces and a last full stop do not count."""
    return " ".join(text.split()).casefold().rstrip(".").strip()


def _answers(task: Task) -> list[str]:
    given = task.answer if isinstance(task.answer, list) else [task.answer]
    return [each for each in given if isinstance(each, str) and each]


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _is_of_schema(task: Task, answer: str) -> bool:
    try:
        found = json.loads(answer)
        jsonschema.validate(found, task.schema or {})
    except (ValueError, jsonschema.ValidationError):
        return False
    wanted = task.answer if isinstance(task.answer, dict) else {}
    return all(_same(found.get(name), value) for name, value in wanted.items())


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return normal(found) == normal(wanted)
    return bool(found == wanted)
