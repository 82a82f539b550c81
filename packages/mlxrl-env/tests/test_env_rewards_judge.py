"""The judge: a server of a few lines that answers right, wrong, late, or not at all."""

# pyright: reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlxrl.env import JudgeReward, reward_function


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def served(answer):
    """A server whose answer(question, number) gives status and body; yields its address and the requests it saw."""
    seen, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            with lock:
                seen.append((self.path, dict(self.headers), body))
                number = len(seen)
            status, text = answer(body["messages"][-1]["content"] if body else "", number)
            self.send_response(status)
            if status in (302, 307):
                self.send_header("Location", text)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):  # what a redirect makes of a question
            self.do_POST()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def verdict(content):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


def score(url, completions, prompts=None, **options):
    columns = {name: options.pop(name) for name in ("answer", "level") if name in options}
    judge = JudgeReward(**{"base_url": url, "model": "judge", "retries": 0, "seconds": 20.0} | options)
    prompts = ["What is 2+2?"] * len(completions) if prompts is None else prompts
    return judge(prompts=prompts, completions=completions, completion_ids=None, trajectories=None, **columns)


def test_the_last_number_of_the_verdict_is_the_reward_of_its_row():
    def answer(question, number):
        return verdict("Score: 1 would be too much.\n**Score: 0.25**" if "five" in question else "score 1")

    with served(answer) as (url, seen):
        assert score(url, ["four", "five", "four"]) == [1.0, 0.25, 1.0]
    path, headers, body = seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 1024)
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert "Question:\nWhat is 2+2?\n" in message["content"]


def test_the_template_takes_columns_messages_and_braces_and_the_key_goes_along(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    prompts = [({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi {x}"})]
    options = {
        "prompt": "{{{prompt}}} {completion} {answer}",
        "pattern": r"=(\d+)",
        "most": 10,
        "api_key_env": "JUDGE_KEY",
    }
    with served(lambda *_: verdict("a=3 b=7")) as (url, seen):
        rewards = score(url, ["{y}"], prompts, answer=["{z}"], system_prompt="You judge.", **options)
    assert rewards == [7.0]
    assert seen[0][2]["messages"] == [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": "{system: Be kind.\n\nuser: Hi {x}} {y} {z}"},
    ]
    assert seen[0][1]["Authorization"] == "Bearer abc"


def test_a_template_names_the_columns_that_it_needs():
    options = {"base_url": "http://127.0.0.1:1", "model": "m"}
    assert reward_function("llm-judge", **options).columns == ()
    judge = reward_function("llm-judge", prompt="{prompt} {completion} {level} {answer!r} {level}", **options)
    assert judge.columns == ("level", "answer")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("I cannot say.", "the judge gave no number: 'I cannot say.'"),
        ("", "the judge gave no number: ''"),
        ("Score: 1000", "the judge gave 1000.0, not 0.0 to 1.0"),
        ("Score: -1", "the judge gave -1.0, not 0.0 to 1.0"),
    ],
)
def test_a_verdict_without_a_score_fails_its_row_alone(content, reason):
    with served(lambda question, _: verdict(content if "bad" in question else "Score: 0.5")) as (url, _):
        good, bad = score(url, ["good", "bad"])
    assert (good, str(bad)) == (0.5, reason)
    assert isinstance(bad, Exception)


@pytest.mark.parametrize(
    "body", ["no JSON", "[]", "{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}']
)
def test_an_answer_that_is_no_chat_completion_fails_its_row(body):
    with served(lambda *_: (200, body)) as (url, seen):
        (error,) = score(url, ["x"], retries=3)
    assert str(error) == f"the judge's server answered what is no chat completion: {body!r}"
    assert len(seen) == 1  # asked again it would say the same


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_at_fault_is_asked_again(status):
    with served(lambda _, number: (status, "busy") if number == 1 else verdict("Score: 1")) as (url, seen):
        assert score(url, ["x"], retries=1) == [1.0]
        assert len(seen) == 2
    with served(lambda *_: (status, "busy")) as (url, seen):
        (error,) = score(url, ["x"], retries=1)
        assert len(seen) == 2
    assert str(error) == f"the judge's server answered {status}: busy"


def test_a_question_that_the_server_refuses_is_not_asked_again():
    with served(lambda *_: (401, "no such\nkey")) as (url, seen):
        (error,) = score(url, ["x"], retries=3)
    assert (str(error), len(seen)) == ("the judge's server answered 401: no such key", 1)


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_fails_the_row_in_time_and_the_others_are_scored(drips):
    over = threading.Event()

    class Hanging(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(200)
            self.end_headers()
            if "hang" not in body:
                self.wfile.write(verdict("Score: 1")[1].encode())
                return
            while not over.wait(0.05):
                if drips:  # a byte at a time, so that no single read takes long
                    self.wfile.write(b" ")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # the client hangs up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hung, good = score(f"http://127.0.0.1:{server.server_port}", ["hang", "good"], seconds=2.0)
    over.set()
    server.shutdown()
    server.server_close()
    assert good == 1.0
    assert str(hung).startswith("the judge could not be asked: ")


def test_a_server_that_is_not_there_fails_every_row():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    rewards = score(url, ["x", "y"])
    assert all(str(error).startswith("the judge could not be asked: ") for error in rewards)


def test_the_key_does_not_follow_a_redirect_to_another_server(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    with (
        served(lambda *_: verdict("Score: 1")) as (other, seen_there),
        served(lambda *_: (302, f"{other}/chat/completions")) as (url, seen),
    ):
        assert score(url, ["x"], api_key_env="JUDGE_KEY") == [1.0]
    assert seen[0][1]["Authorization"] == "Bearer abc"
    assert "Authorization" not in seen_there[0][1]


def test_no_more_questions_are_asked_at_a_time_than_allowed():
    running, most, lock, full = 0, 0, threading.Lock(), threading.Barrier(3, timeout=20)

    def answer(question, number):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait()  # three are here together, or the test fails
        with lock:
            running -= 1
        return verdict("Score: 1")

    with served(answer) as (url, _):
        assert score(url, ["x"] * 9, concurrency=3) == [1.0] * 9
    assert most == 3


def test_options_that_cannot_be_meant_are_refused(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    for options, message in (
        ({"base_url": "localhost:8000"}, "base_url must start with http:// or https://, got 'localhost:8000'"),
        ({"model": ""}, "model must be text, and not empty"),
        ({"prompt": "{prompt"}, "prompt must be a text with names in braces"),
        ({"prompt": "{prompt.x}"}, r"prompt has \{prompt.x\}, which is no column's name"),
        ({"prompt": "{}"}, r"prompt has \{\}, which is no column's name"),
        ({"pattern": r"\d+"}, "pattern must have a group for the number"),
        ({"pattern": "("}, "pattern must be a regular expression"),
        ({"least": 1.0}, "least must be below most, got 1.0 and 1.0"),
        ({"api_key_env": "NO_KEY"}, "names the environment variable 'NO_KEY', which is not set; set it"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"retries": -1}, "retries must be a whole number of at least 0"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            reward_function("llm-judge", **{"base_url": "http://127.0.0.1:1", "model": "m"} | options)
    with pytest.raises(ValueError, match="reward 'llm-judge' needs the option 'model'"):
        reward_function("llm-judge", base_url="http://127.0.0.1:1")
