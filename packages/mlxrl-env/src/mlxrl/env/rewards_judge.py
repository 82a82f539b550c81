"""A reward that a language model gives, asked over an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import json
import os
import re
import string
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, cast

from mlxrl.env.options import check_pattern, check_real, check_text, check_whole
from mlxrl.env.task import as_messages

TEMPLATE = """You grade an answer.

Question:
{prompt}

Answer:
{completion}

How good is the answer, from 0 (useless) to 1 (perfect)? End with a line "Score: NUMBER"."""
PATTERN = r"(?i)score\s*:?\s*\**\s*(-?[0-9]*\.?[0-9]+)"
# Answers of a server that asking again may change.
PASSING = (408, 409, 425, 429)
LONGEST_ANSWER = 2**20  # bytes


class JudgeError(RuntimeError):
    """A row that the judge gave no score."""


class JudgeReward:
    """The number that a language model ends its verdict on a completion with.

    A row that the judge cannot be asked for, or gives no number or one out of range, fails; the others are scored.

    Args:
        base_url: the endpoint's address, up to before /chat/completions: "http://localhost:8000/v1".
        model: the judge's name there.
        prompt: what to ask: a text with {prompt}, {completion} and columns of the data in braces; {{ is a brace.
        pattern: a regular expression whose first group is the number; its last match in the verdict counts.
        least: lowest score.
        most: highest score.
        system_prompt: a system message before the question.
        api_key_env: name of the environment variable that holds the key, where one is needed.
        temperature: the judge's.
        max_tokens: longest verdict.
        seconds: how long a verdict may take.
        retries: how often to ask again after a timeout, a lost connection, or a server that is at fault or busy.
        concurrency: most questions at a time.

    Raises:
        ValueError: an option is out of range, the template or the pattern is none, or the variable holds no key.
    """

    bounded = True

    def __init__(
        self,
        base_url: str,
        model: str,
        prompt: str = TEMPLATE,
        pattern: str = PATTERN,
        least: float = 0.0,
        most: float = 1.0,
        system_prompt: str | None = None,
        api_key_env: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        seconds: float = 60.0,
        retries: int = 2,
        concurrency: int = 8,
    ) -> None:
        if not check_text("base_url", base_url).startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._settings = {
            "model": check_text("model", model),
            "temperature": check_real("temperature", temperature, 0.0),
            "max_tokens": check_whole("max_tokens", max_tokens, 1),
        }
        self._prompt = check_text("prompt", prompt)
        self.columns = tuple(name for name in _fields(prompt) if name not in ("prompt", "completion"))
        self._pattern = _compiled(pattern)
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if not least < most:
            raise ValueError(f"least must be below most, got {least} and {most}")
        self._range = least, most
        self._key = None if api_key_env is None else os.environ.get(check_text("api_key_env", api_key_env))
        if api_key_env is not None and not self._key:
            raise ValueError(f"api_key_env names the environment variable {api_key_env!r}, which is not set; set it")
        if check_real("seconds", seconds, 0.0) == 0:
            raise ValueError("seconds must be above 0, got 0")
        self._seconds = seconds
        self._retries = check_whole("retries", retries, 0)
        self._concurrency = check_whole("concurrency", concurrency, 1)
        self.scored_by = f"{model} at {self._url}"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        **columns: Sequence[Any],
    ) -> list[float | JudgeError]:
        """Scores a batch."""
        questions = [
            self._prompt.format(
                prompt=_text(prompt), completion=completion, **{name: columns[name][row] for name in self.columns}
            )
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self._score, questions))

    def _score(self, question: str) -> float | JudgeError:
        try:
            verdict = self._verdict(question)
        except JudgeError as error:
            return error
        numbers = [match[1] for match in self._pattern.finditer(verdict)]
        try:
            score = float(numbers[-1])
        except (IndexError, TypeError, ValueError):
            return JudgeError(f"the judge gave no number: {_short(verdict)!r}")
        least, most = self._range
        return score if least <= score <= most else JudgeError(f"the judge gave {score}, not {least} to {most}")

    def _verdict(self, question: str) -> str:
        why = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(2.0 ** (attempt - 2), 8.0))
            try:
                return self._ask(question)
            except urllib.error.HTTPError as error:
                why = f"the judge's server answered {error.code}: {_short(error.read(1000).decode(errors='replace'))}"
                if error.code < 500 and error.code not in PASSING:
                    break
            except (OSError, HTTPException) as error:
                why = f"the judge could not be asked: {error or type(error).__name__}"
        raise JudgeError(why)

    def _ask(self, question: str) -> str:
        """The verdict on a question.

        Raises:
            OSError, HTTPException: no answer came, or not in time.
            JudgeError: it is none.
        """
        messages = [*self._system, {"role": "user", "content": question}]
        request = urllib.request.Request(
            self._url,
            json.dumps({**self._settings, "messages": messages}).encode(),
            {"Content-Type": "application/json"},
        )
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        deadline = time.monotonic() + self._seconds
        body = b""
        with urllib.request.urlopen(request, timeout=self._seconds) as response:
            while part := response.read1(65536):
                body += part
                if time.monotonic() > deadline or len(body) > LONGEST_ANSWER:
                    raise TimeoutError(f"no whole answer within {self._seconds:g} s and {LONGEST_ANSWER} bytes")
        try:
            content = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            content = None
        if not isinstance(content, str):
            raise JudgeError(
                f"the judge's server answered what is no chat completion: {_short(body.decode(errors='replace'))!r}"
            )
        return content


def _fields(template: str) -> list[str]:
    """The names in a template's braces."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"prompt must be a text with names in braces: {error}") from None
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"prompt has {{{name}}}, which is no column's name; a brace of its own is written {{{{")
    return list(dict.fromkeys(names))


def _compiled(pattern: str) -> re.Pattern[str]:
    compiled = check_pattern("pattern", pattern)
    if not compiled.groups:
        raise ValueError(f"pattern must have a group for the number, got {pattern!r}; set brackets around it")
    return compiled


def _text(prompt: Any) -> str:
    """A prompt as text: chat messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    messages = as_messages(cast(object, prompt))
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."
