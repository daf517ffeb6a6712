"""The demo's engine: a small HTTP server around transformers that knows nothing of Ballast.

    POST /v1/completions  {"prompt": "What is the capital of France?", "max_tokens": 32}
    GET  /health

Answers greedily, one request at a time. Not for production: it stands for the engine that you have.
"""

# mypy: ignore-errors

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PORT = 8000
LIMIT = 1 << 20  # bytes of a request

# As a container's first process it would not be ended by SIGTERM otherwise, and every stop would take until the SIGKILL.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint)


def complete(prompt, max_tokens):
    chat = [{"role": "user", "content": prompt}]
    question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**question, max_new_tokens=max_tokens, do_sample=False)
    tokens = output[0, question["input_ids"].shape[1] :]
    return {"text": tokenizer.decode(tokens, skip_special_tokens=True), "tokens": tokens.tolist()}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, {"model": checkpoint})

    def do_POST(self):
        try:
            length = int(self.headers.get("Content-Length", 0))
            asked = json.loads(self.rfile.read(min(length, LIMIT)))
            prompt, max_tokens = str(asked["prompt"]), max(1, min(256, int(asked.get("max_tokens", 32))))
        except (ValueError, KeyError, TypeError, AttributeError):
            self.answer(400, {"error": 'send JSON such as {"prompt": "...", "max_tokens": 32}'})
            return
        self.answer(200, {"choices": [complete(prompt, max_tokens)]})

    def answer(self, status, document):
        body = json.dumps(document).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("", PORT), Handler)
print(f"ready on port {PORT}", flush=True)
server.serve_forever()
