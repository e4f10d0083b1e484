"""A scripted server on loopback that speaks the protocols of OpenAI (chat) and Anthropic (messages)."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = dict[str, Any]  # {"text": str} or {"tool": name, "args": {...}}; "reasoning": str and "cut": True may stand beside either
# {"status": int, "body": dict or str} is the answer as it is
Script = Callable[[list[dict[str, Any]], list[str]], Reply]  # (messages, tool names) -> reply


MODEL = "openai-api/fake/model-x"


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script, rate_limited: int = 0, broken: int = 0, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.rate_limited, self.broken, self.delay_s = script, rate_limited, broken, delay_s
        self.requests: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.busy = self.peak = 0
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def words(self, model: str = MODEL) -> list[str]:
        """The options of a command that asks this server."""
        url = self.url.removesuffix("/v1") if model.startswith("anthropic/") else self.url
        return ["--model", model, "--base-url", url, "--hardware", "h200x4"]

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that hang up are part of the tests

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            return self.answer(200, {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "peerlane"}]})
        self.answer(200, {"status": "ok", **self.server.counts, "peak": self.server.peak})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        fake = self.server
        with fake.guard:
            fake.requests.append(body | {"_path": self.path, "_headers": dict(self.headers)})
            fake.busy += 1
            fake.peak = max(fake.peak, fake.busy)
            fail = 429 if fake.rate_limited > 0 else 500 if fake.broken > 0 else 0
            fake.rate_limited -= fail == 429
            fake.broken -= fail == 500
            fake.counts[f"n_{fail or 200}"] = fake.counts.get(f"n_{fail or 200}", 0) + 1
        try:
            time.sleep(fake.delay_s)
            if fail:
                error = {"error": {"message": f"scripted {fail}", "type": "rate_limit_error" if fail == 429 else "server_error"}}
                return self.answer(fail, error, {"Retry-After": "0"})
            anthropic = self.path.endswith("/messages")
            tools = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", [])]
            reply = fake.script(openai_messages(body["messages"]), tools)
            if "status" in reply:
                return self.answer(reply["status"], reply["body"], {"Content-Type": reply.get("type", "application/json")})
            (self.messages if anthropic else self.chat)(body, reply)
        finally:
            with fake.guard:
                fake.busy -= 1

    def chat(self, body: dict[str, Any], reply: Reply) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": reply.get("text"), "refusal": reply.get("refusal")}
        if "reasoning" in reply:
            message["reasoning_content"] = reply["reasoning"]  # as vLLM, SGLang and DeepSeek name it
        if "tool" in reply:
            call = {"name": reply["tool"], "arguments": json.dumps(reply["args"])}
            message["tool_calls"] = [{"id": f"call_{time.time_ns()}", "type": "function", "function": call}]
        usage = {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": 140}
        usage["prompt_tokens_details"] = {"cached_tokens": 64}
        usage["completion_tokens_details"] = {"reasoning_tokens": 8}
        reason = "tool_calls" if "tool" in reply else "length" if reply.get("cut") else "stop"
        base = {"id": "chatcmpl-1", "created": 0, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            return self.answer(200, base | {"object": "chat.completion", "choices": [choice], "usage": usage})
        for index, call in enumerate(message.get("tool_calls", [])):
            call["index"] = index
        chunk = base | {"object": "chat.completion.chunk"}
        events = [chunk | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]}]
        events += [chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, chunk | {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answer(200, text, {"Content-Type": "text/event-stream"})

    def messages(self, body: dict[str, Any], reply: Reply) -> None:
        if "tool" in reply:
            content = [{"type": "tool_use", "id": f"toolu_{time.time_ns()}", "name": reply["tool"], "input": reply["args"]}]
        else:
            content = [{"type": "text", "text": reply["text"]}]
        usage = {"input_tokens": 36, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 0, "output_tokens": 40}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": content, "stop_sequence": None}
        end = {"stop_reason": "tool_use" if "tool" in reply else "end_turn"}
        if not body.get("stream"):
            return self.answer(200, message | end | {"usage": usage})
        block = content[0] | ({"input": {}} if "tool" in reply else {"text": ""})
        part = (
            {"type": "input_json_delta", "partial_json": json.dumps(reply["args"])}
            if "tool" in reply
            else {"type": "text_delta", "text": reply["text"]}
        )
        start = message | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        events += [{"type": "content_block_start", "index": 0, "content_block": block}]
        events += [{"type": "content_block_delta", "index": 0, "delta": part}, {"type": "content_block_stop", "index": 0}]
        events += [
            {"type": "message_delta", "delta": end | {"stop_sequence": None}, "usage": {"output_tokens": 40}},
            {"type": "message_stop"},
        ]
        self.answer(200, "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events), {"Content-Type": "text/event-stream"})

    def answer(self, status: int, body: dict[str, Any] | str, headers: dict[str, str] | None = None) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def openai_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Anthropic's tool results are content blocks of user messages: give each a message of role tool, as OpenAI has it."""
    out: list[dict[str, Any]] = []
    for message in messages:
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        results = [block for block in blocks if block.get("type") == "tool_result"]
        out += [{"role": "tool", "content": block.get("content")} for block in results] or [message]
    return out
