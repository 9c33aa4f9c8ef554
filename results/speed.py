"""Cost and precision of every scheme, behind the README's figures:  python results/speed.py [steps|memory|rows|full|gpu ...]

  steps   time of a training step of the tiny preset: median over interleaved steps, as a ratio to rope's
  memory  one forward of 16,384 / 32,768 / 65,536 tokens (one layer, one head of 64): peak resident memory over that of a short
          forward, and time as a ratio to the bare calls (SDPA and matmuls of the same sizes) measured in the same process
  rows    attention alone at 65,536 tokens, one head of 64: time as a ratio to bare SDPA, and the relative error of the last 64
          rows against a float64 recursion, step by step
  full    one forward of 65,536 tokens through the paper's model (16 x 768, GPT-2 vocabulary): seconds, as a ratio to the bare calls
          of the same sizes, and peak memory, weights included; not among the default ones, since it takes minutes on a GPU, half an hour on CPU
  gpu     the paper preset on synthetic tokens, 60 steps a scheme: tokens per second, MFU, peak memory; needs CUDA
Writes results/speed.json; full and gpu on CUDA write results/gpu.json.
"""
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import numpy as np
import torch
import torch.nn.functional as F

import train
import transport
from eval_extrapolate import peak_mb
from model import LOGITS_AT_ONCE, GPT, GPTConfig

# random_* run the code of accum_*
POS = ["rope", "rope_qkv", "nope", "accum_qk", "accum_qkv", "hidden_qk", "hidden_qkv", "householder_qk", "householder_qkv", "path",
       "alibi", "fox", "accum_qkv+alibi", "accum_qkv+fox", "path+fox"]
CPU = torch.device("cpu")


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def model_of(pos, n_head, n_layer):
    torch.manual_seed(0)
    return GPT(GPTConfig(pos=pos, n_layer=n_layer, n_head=n_head, n_embd=64 * n_head, vocab_size=320))


def steps(compiled, n=21):
    """-> {pos: milliseconds, ratio to rope}: batch 16 x 256, bfloat16 autocast, forward, backward, clipping and AdamW."""
    x, y = (torch.randint(0, 257, (16, 256)) for _ in range(2))
    runs = {}
    for pos in POS if not compiled else ["rope", "accum_qkv", "alibi", "accum_qkv+alibi"]:
        model = model_of(pos, n_head=2, n_layer=4)
        runs[pos] = model, train.make_optimizer(model, train.TrainConfig(), "cpu"), torch.compile(model) if compiled else model

    def step(model, optimizer, call):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    times = {pos: [] for pos in runs}
    for i in range(n + 2):
        for pos, run in runs.items():
            times[pos].append(seconds(lambda: step(*run)))
    median = {pos: sorted(t[2:])[n // 2] for pos, t in times.items()}
    return {pos: {"ms": round(1e3 * t, 1), "ratio": round(t / median["rope"], 3)} for pos, t in median.items()}


@torch.no_grad()
def memory_of(pos, T):
    """-> MB over a short forward, seconds, ratio to the bare calls. Runs in a process of its own."""
    model = model_of(pos, n_head=1, n_layer=1)
    idx = torch.randint(0, 257, (1, T + 1))
    model.nll(idx[:, :64], idx[:, 1:65])
    x, qkv = torch.randn(T, 256), torch.randn(3, 1, 1, T, 64)
    weights = [torch.randn(a, b) for a, b in ((64, 192), (64, 64), (64, 256), (256, 64), (64, 320))]

    def bare():
        F.scaled_dot_product_attention(*qkv, is_causal=True)
        for w in weights:
            x[:, :w.size(0)] @ w
    bare_time = seconds(bare)
    peak_mb(CPU, reset=True)
    before = peak_mb(CPU)
    forward = seconds(lambda: model.nll(idx[:, :-1], idx[:, 1:]))
    grown = peak_mb(CPU) - before
    if T < 65536:
        bare_time = min(bare_time, seconds(bare))
    return {"mb": round(grown), "seconds": round(forward, 2), "ratio": round(forward / bare_time, 3)}


def recursion(q, k, v, step, bias, values, n=64):
    """float64, token by token: C_t = step(t, C_{t-1}) with C_0 = I; the last n rows of attention over all T keys. (T, d) each."""
    T, d = q.shape
    C, K, V, Q, Cs = torch.eye(d, dtype=torch.float64), k.double().clone(), v.double().clone(), q.double().clone(), {}
    for t in range(T):
        C = step(t, C)
        K[t] = C.T @ K[t]
        if values:
            V[t] = C.T @ V[t]
        if t >= T - n:
            Cs[t] = C
    rows = []
    for t in range(T - n, T):
        scores = K[:t + 1] @ (Cs[t].T @ Q[t]) / math.sqrt(d) + bias[:t + 1] - bias[t]
        o = scores.softmax(0) @ V[:t + 1]
        rows.append(Cs[t] @ o if values else o)
    return torch.stack(rows)


def path_recursion(q, k, v, w, beta, bias, n=64):
    """The same for PaTH, whose C_t is singular: queries are carried back over the keys instead."""
    T, d = q.shape
    r, w, k = q[-n:].double().clone(), w.double(), k.double()
    scores = torch.full((n, T), -math.inf, dtype=torch.float64)
    for j in range(T - 1, -1, -1):
        first = max(0, j - (T - n))                                         # rows T - n + first, ... see key j
        scores[first:, j] = r[first:] @ k[j]
        r[first:] -= beta[j].double() * (r[first:] @ w[j])[:, None] * w[j]
    return (scores / math.sqrt(d) + bias - bias[-n:, None]).softmax(-1) @ v.double()


@torch.no_grad()
def rows(T=65536, d=64, n=64):
    torch.manual_seed(0)
    q, k, v, w = (torch.randn(1, 1, T, d) for _ in range(4))
    beta, log_f = 2 * torch.rand(1, 1, T), F.logsigmoid(torch.randn(1, 1, T) + 4)
    steps_, unit = 0.3 * torch.randn(T, d // 2), F.normalize(w, dim=-1)
    zero, slope = torch.zeros(T, dtype=torch.float64), 2.0 ** -8 * torch.arange(T, dtype=torch.float64)
    gate = transport.forget_bias(log_f)

    def turn(t, C):
        cos, sin = steps_[t].double().cos()[:, None], steps_[t].double().sin()[:, None]
        return torch.cat((cos * C[:d // 2] + sin * C[d // 2:], cos * C[d // 2:] - sin * C[:d // 2]))

    def reflect(t, C):
        u = w[0, 0, t].double()
        return C - 2 / (u @ u) * torch.outer(u, u @ C)

    def householder(values):
        frame = transport.householder(w)
        enc = lambda x: transport.householder_encode(x, frame)
        o = transport.attend(enc(q), enc(k), enc(v) if values else v)
        return transport.householder_decode(o, frame) if values else o
    accum = lambda values, bias=None: transport.attend(q, k, v, transport.accumulate(steps_)[None, None], values, bias)
    stay = lambda t, C: C
    one = [t[0, 0] for t in (q, k, v)]
    cases = {
        "accum_qk": (lambda: accum(False), lambda: recursion(*one, turn, zero, False)),
        "accum_qkv": (lambda: accum(True), lambda: recursion(*one, turn, zero, True)),
        "accum_qkv+alibi": (lambda: accum(True, slope[None, None]), lambda: recursion(*one, turn, slope, True)),
        "alibi": (lambda: transport.attend(q, k, v, key_bias=slope[None, None]), lambda: recursion(*one, stay, slope, False)),
        "fox": (lambda: transport.attend(q, k, v, key_bias=transport.forget_bias(log_f)), lambda: recursion(*one, stay, gate[0, 0], False)),
        "householder_qk": (lambda: householder(False), lambda: recursion(*one, reflect, zero, False)),
        "householder_qkv": (lambda: householder(True), lambda: recursion(*one, reflect, zero, True)),
        "path": (lambda: transport.path_attention(q, k, v, unit, beta), lambda: path_recursion(*one, unit[0, 0], beta[0, 0], zero)),
        "path+fox": (lambda: transport.path_attention(q, k, v, unit, beta, log_f), lambda: path_recursion(*one, unit[0, 0], beta[0, 0], gate[0, 0])),
    }
    out = {}
    for name, (fast, reference) in cases.items():
        bare = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        got = []
        time_fast = seconds(lambda: got.append(fast()))
        bare = min(bare, seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        ref = reference()
        error = ((got[0][0, 0, -n:].double() - ref).norm() / ref.norm()).item()
        out[name] = {"ratio": round(time_fast / bare, 3), "error": float(f"{error:.2g}")}
        print(name, out[name], flush=True)
    return out


@torch.no_grad()
def full_of(pos, T, n_layer=16):
    """-> seconds of one forward of T tokens, its ratio to the bare calls, and peak MB. Runs in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = GPT(GPTConfig(pos=pos, n_layer=n_layer)).to(device)
    c, idx = model.config, torch.randint(0, 50257, (1, T + 1), device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(f):
        wait()
        return seconds(lambda: (f(), wait()))

    def forward(n):
        with train.autocast(device, dtype):
            model.nll(idx[:, :n], idx[:, 1:n + 1])
    forward(64)
    peak_mb(device, reset=True)
    time_model = timed(lambda: forward(T))
    peak = peak_mb(device)
    q, k, v = torch.randn(3, 1, c.n_head, T, c.n_embd // c.n_head, device=device, dtype=dtype)
    x = torch.randn(T, 4 * c.n_embd, device=device, dtype=dtype)
    layer = [torch.randn(a * c.n_embd, b * c.n_embd, device=device, dtype=dtype) for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))]
    head, rows = torch.randn(c.n_embd, c.vocab_size, device=device, dtype=dtype), LOGITS_AT_ONCE // c.vocab_size
    sdpa = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    matmul = timed(lambda: [x[:, :w.size(0)] @ w for w in layer])
    logits = timed(lambda: [x[i:i + rows, :c.n_embd] @ head for i in range(0, T, rows)])
    bare = c.n_layer * (sdpa + matmul) + logits
    return {"context": T, "layers": c.n_layer, "dtype": str(dtype)[6:], "seconds": round(time_model, 1), "bare_seconds": round(bare, 1),
            "ratio": round(time_model / bare, 3), "sdpa_share": round(c.n_layer * sdpa / bare, 3), "peak_mb": peak}


def train_of(pos, *flags):
    """-> a run of the paper preset on random tokens, 60 steps (or as the flags say): what its log says of the last steps."""
    with tempfile.TemporaryDirectory() as folder:
        for split, n in (("train", 20), ("val", 2)):
            np.random.default_rng(0).integers(0, 50257, n * 10 ** 6, dtype=np.uint16).tofile(Path(folder) / f"{split}.bin")
        train.main(["--preset", "paper", "--pos", pos, "--data", folder, "--out_dir", f"{folder}/run", "--max_iters", "60", "--eval_interval", "0",
                    "--eval_iters", "1", *flags])
        entries = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]
    config, steps_ = entries[0], [e for e in entries if "tokens_per_second" in e]
    rate = max(e["tokens_per_second"] for e in steps_[1:] or steps_)
    model = GPT(GPTConfig(**config["model_config"]))
    mfu = train.mfu(model, config["train_config"]["block_size"], rate, config["device"])
    return {"tokens_per_second": round(rate), "mfu": mfu and round(mfu, 3), "micro_batch": config["train_config"]["batch_size"],
            "peak_mb": peak_mb(torch.device("cuda")) if torch.cuda.is_available() else None, "loss": round(steps_[-1]["loss"], 3)}


def in_process(*args):
    """The last line that this script prints when called with args, as JSON."""
    result = subprocess.run([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    if sys.argv[1:2] == ["one"]:
        return print(json.dumps(memory_of(sys.argv[2], int(sys.argv[3]))))
    if sys.argv[1:2] == ["full_one"]:
        return print(json.dumps(full_of(sys.argv[2], *map(int, sys.argv[3:]))))
    if sys.argv[1:2] == ["train_one"]:
        return print("\n" + json.dumps(train_of(*sys.argv[2:])))
    wanted, path = sys.argv[1:] or ["steps", "memory", "rows"], HERE / "speed.json"
    if torch.cuda.is_available() and set(wanted) & {"full", "gpu"}:
        wanted, path = set(wanted) & {"full", "gpu"}, HERE / "gpu.json"
    elif "gpu" in wanted:
        sys.exit("error: speed.py gpu needs a CUDA device")
    result = json.loads(path.read_text()) if path.exists() else {}
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), platform.processor())
    where = torch.cuda.get_device_name() if path.stem == "gpu" else f"{cpu}, {torch.get_num_threads()} threads"
    result["machine"] = f"{where}, torch {torch.__version__}, Python {platform.python_version()}"
    if "steps" in wanted:
        result["step"] = {"eager": steps(False)} | ({"compiled": steps(True)} if train.can_compile("cpu") else {})
    if "memory" in wanted:
        result["forward"] = {}
        for pos in POS:
            result["forward"][pos] = {T: in_process("one", pos, T) for T in (16384, 32768, 65536)}
            print(pos, result["forward"][pos], flush=True)
    if "rows" in wanted:
        result["attention"] = rows()
    for name, mode, schemes, args in (("gpu", "train_one", ["rope", "accum_qkv", "accum_qkv+alibi", "path"], []),
                                      ("full", "full_one", ["accum_qkv"] if path.stem == "speed" else ["rope", "accum_qkv", "accum_qkv+alibi", "path"], [65536])):
        if name in wanted:
            result[name] = {}
            for pos in schemes:
                result[name][pos] = in_process(mode, pos, *args)
                print(pos, result[name][pos], flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
