"""Serve images (Flux) or videos (Wan) over HTTP, each sampling step on all ranks.

    torchrun --nproc-per-node 4 serve.py --tiny flux --device cpu --ulysses-degree 2
    curl localhost:8000/generate -d '{"prompt": "a fox", "height": 64, "width": 96}' -o fox.png

Answers with a PNG (Wan: a GIF); ``GET /health``: what ranks do; SIGTERM ends after those that wait.
"""

import datetime
import json
import queue
import signal
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import torch
import torch.distributed as dist
from common import file_of, flags, from_rank0, mesh_of, print0, run, start
from generate import embeddings, pipeline_of

from ds_usp.integrations.diffusers import enable, enable_vae

# Fields of a request: default, smallest and largest value, of texts the smallest, largest length
FIELDS = MappingProxyType({"prompt": ("", 1, 8192), "negative_prompt": ("", 0, 8192),
    "height": (1024, 16, 4096), "width": (1024, 16, 4096), "num_frames": (81, 1, 257),
    "steps": (28, 1, 200), "guidance_scale": (3.5, 0, 100), "lora": ("", 0, 256),
    "lora_scale": (1.0, -10, 10), "seed": (0, 0, 2**63 - 1)})  # fmt: skip
WAITING, PATIENCE = 64, 120.0  # requests; seconds without a step until /health is 503


def request_of(body, loras):
    """All fields of a request; ValueError says what is wrong with it."""
    if not isinstance(given := json.loads(body), dict) or given.keys() - FIELDS.keys():
        raise ValueError(f"give a JSON object of {', '.join(FIELDS)}, of which prompt is needed")
    request = {name: given.get(name, default) for name, (default, _, _) in FIELDS.items()}
    for name, (default, low, high) in FIELDS.items():
        value, kinds = request[name], {float: {float, int}}.get(type(default), {type(default)})
        if type(value) not in kinds or not low <= (len(value) if default == "" else value) <= high:
            raise ValueError(f"{name}={value!r:.99}: {type(default).__name__}, {low} to {high}")
    if request["lora"] not in ("", *loras):
        raise ValueError(f"lora={request['lora']!r}: there are {', '.join(loras) or 'none'}")
    return request


class Handler(BaseHTTPRequestHandler):
    """One connection, with a thread that waits until :func:`loop` has its answer."""

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def do_GET(self):
        since = self.server.state["since"]
        silent = time.monotonic() - since if since else 0.0
        state = {**self.server.state, "since": silent, "waiting": self.server.jobs.qsize()}
        self.answer(404 if self.path != "/health" else 503 if silent > PATIENCE else 200, state)

    def do_POST(self):
        try:
            body = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 2**16))
            request = request_of(body if self.path == "/generate" else "0", self.server.loras)
            if self.server.state["ends"] or self.server.jobs.qsize() >= WAITING:
                return self.answer(503, {"error": "it ends, or is full: try again later"})
            self.server.jobs.put((request, future := Future()))
            self.answer(200, *future.result())
        except Exception as error:  # the request is wrong, or has failed
            self.answer(400 if isinstance(error, ValueError) else 500, {"error": str(error)})


def generate(pipeline, request, prompt, args, device, state):
    """Of a request, the bytes of an image or a video and their type; on rank 0."""
    if request["lora"]:
        pipeline.set_adapters([request["lora"]], [request["lora_scale"]])
    if args.lora:
        (pipeline.enable_lora if request["lora"] else pipeline.disable_lora)()
    options = {name: x.to(device) for name, x in prompt.items() if x is not None}
    names = ("height", "width", "guidance_scale", "num_frames")  # the last one Wan's
    options |= {x: request[x] for x in names[: 4 if hasattr(pipeline, "transformer_2") else 3]}
    kind = "pil" if dist.get_rank() == 0 or args.tiled_vae else "latent"  # who decodes
    noise = torch.Generator().manual_seed(request["seed"])  # the same on every rank
    step = lambda _, i, __, x: state.update(step=i + 1, since=time.monotonic()) or x  # noqa: E731
    out = pipeline(**options, num_inference_steps=request["steps"], generator=noise,
                   output_type=kind, callback_on_step_end=step)[0]  # fmt: skip
    return file_of(out) if dist.get_rank() == 0 else None


def loop(pipeline, mesh, device, args, jobs, state):
    """Serve until the job of rank 0 is None; an error that is no request's ends all ranks."""
    # Ranks wait on the CPU, not in NCCL, and as long as it takes.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
    while True:
        state.update(step=0, since=0.0)
        request, future = jobs.get() if dist.get_rank() == 0 else (None, None)
        state.update(since=time.monotonic())
        request = from_rank0(lambda request=request: request, group)
        number = state["done"] + state["failed"] + 1
        mesh.agree(f"request {number}")  # finds a rank that is out of step
        if request is None:
            return 0
        seed = sum(request["prompt"].encode())  # of a tiny model's random embeddings
        texts = type(args)(**request | {"tiny": args.tiny, "seed": seed})
        try:
            prompt = from_rank0(lambda texts=texts: embeddings(pipeline, texts, device), group)
            with mesh.together(f"request {number}"):  # an error on one rank is one on all of them
                result = generate(pipeline, request, prompt, args, device, state)
        except Exception as error:
            result = RuntimeError(f"request {number}: {error!r}")
            print0(f"{request}: {result}")
        failed = isinstance(result, RuntimeError)
        state["failed" if failed else "done"] += 1
        if future is not None:
            (future.set_exception if failed else future.set_result)(result)


def main(argv=None):
    """Serve until SIGTERM or Ctrl-C."""
    parser = flags(__doc__, samples=True)
    parser.add_argument("--host", default="127.0.0.1", help="listened to, without authentication")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--tiled-vae", action="store_true", help="all ranks decode their tiles")
    args = parser.parse_args(argv)
    device, loras = start(args), dict(x.split("=", 1) for x in args.lora)
    pipeline = pipeline_of(args).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for name, folder in loras.items():
        pipeline.load_lora_weights(folder, adapter_name=name)
    mesh = mesh_of(pipeline.transformer.config.num_attention_heads, args.ulysses_degree)
    enable(pipeline, mesh, kernel=args.kernel, cfg_degree=args.cfg_degree)
    if args.tiled_vae:
        pipeline.vae.enable_tiling(), enable_vae(pipeline, mesh)
    jobs = queue.SimpleQueue()  # which a signal may write while it is read
    state = {"step": 0, "since": 0.0, "done": 0, "failed": 0, "ends": False}
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun's to all; rank 0 tells them when
        signal.signal(number, lambda *_: (state.update(ends=True), jobs.put((None, None))))
    if dist.get_rank() == 0:
        server = ThreadingHTTPServer((args.host, args.port), Handler)
        server.jobs, server.state, server.loras = jobs, state, loras
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print0(f"ready: http://{args.host}:{server.server_port}")
    return loop(pipeline, mesh, device, args, jobs, state)


if __name__ == "__main__":
    raise SystemExit(run(main))
