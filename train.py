"""Train a decoder under one positional scheme:  python train.py --pos accum_qkv

Runs on a bare laptop (preset tiny: the standard library as bytes, a few minutes on two cores) and on CUDA. Every field of
GPTConfig and TrainConfig is a flag; a preset sets several at once, and flags given by hand win. --resume continues exactly.
"""
import argparse
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
from data import die
from model import LOGITS_AT_ONCE, GPT, GPTConfig, is_positional, load_model
from transport import SCHEMES

PRESETS = {
    "tiny":  dict(n_layer=4, n_head=2, n_embd=128, data="stdlib", block_size=256, batch_size=16, max_iters=1200,
                  learning_rate=3e-3, min_lr=3e-4, warmup_iters=50),
    "small": dict(n_layer=8, n_head=6, n_embd=384, data="stdlib", block_size=512, batch_size=32, max_iters=2000,
                  learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    "paper": dict(n_layer=16, n_head=12, n_embd=768, data="openwebtext", block_size=512, batch_size=64,
                  gradient_accumulation_steps=16, max_tokens=3e9, eval_iters=100, learning_rate=6e-4, min_lr=6e-5, warmup_iters=500),
}
# dense bf16 peak, TFLOP/s, by a word in the device's name; no MFU is shown for other devices
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "4090": 165, "3090": 71}
EVAL_SEED, EVAL_BATCH = 2 ** 32 - 1, 16   # validation batches are the same for every run, whatever its seed and its micro-batches


def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class TrainConfig:
    preset: str = option("auto", "tiny, small or paper; auto is paper on CUDA with OpenWebText prepared, else tiny")
    data: str = option("stdlib", "data set: a name under data/, or a folder with train.bin and val.bin")
    out_dir: str = option("", "where the checkpoint and the log go (empty: out/PRESET-POS)")
    block_size: int = option(256, "training context in tokens; nothing in the model is sized by it")
    batch_size: int = option(32, "sequences per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per step")
    max_iters: int = option(1000, "steps in all")
    max_tokens: float = option(0, "tokens to train on in all, in place of max_iters (0: as max_iters says)")
    learning_rate: float = option(2e-3, "peak of the cosine schedule")
    min_lr: float = option(2e-4, "its end")
    warmup_iters: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.1, "on matrices, but not on positional parameters")
    beta1: float = option(0.9, "AdamW")
    beta2: float = option(0.95, "AdamW")
    grad_clip: float = option(1.0, "largest gradient norm (0: no clipping)")
    eval_interval: int = option(250, "steps between validations and saves (0: only at the end)")
    eval_iters: int = option(20, f"validation batches of {EVAL_BATCH} sequences")
    log_interval: int = option(10, "steps between log lines")
    seed: int = option(1, "of initial weights and of the order of the data")
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto is cuda where there is one")
    dtype: str = option("auto", "bfloat16 (autocast) or float32; auto is bfloat16 where the device is fast at it")
    compile: bool = option(None, "torch.compile; default on CUDA only")

    def __post_init__(self):
        for name in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_iters", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_interval < 0 or self.seed < 0 or not 0 <= self.max_tokens < math.inf:
            raise ValueError("eval_interval, seed and max_tokens must not be negative or infinite")
        if self.max_tokens:
            self.max_iters = math.ceil(self.max_tokens / (self.batch_size * self.gradient_accumulation_steps * self.block_size))


def parse_args(argv=None):
    """Flags -> (GPTConfig, TrainConfig, dict of the flags given by hand, resume)."""
    schemes = "\n".join(f"  {name:<16} {s.kind}: {s.about}" for name, s in SCHEMES.items())
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog=f"schemes for --pos (ROTATION, BIAS or ROTATION+BIAS):\n{schemes}")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out_dir from its checkpoint")
    for cls in (GPTConfig, TrainConfig):
        group = parser.add_argument_group(cls.__name__)
        for f in fields(cls):
            kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(type=f.type)
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=f"{f.metadata['help']} (default: {f.default})", **kind)
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if "max_iters" in given:
        given.setdefault("max_tokens", 0)
    preset = given.get("preset", "auto")
    if preset == "auto":
        ready = torch.cuda.is_available() and Path("data/openwebtext/train.bin").exists()
        preset = "paper" if ready else "tiny"
        if os.environ.get("RANK", "0") == "0":
            print(f"preset {preset}: " + ("OpenWebText is prepared and there is a GPU" if ready else
                                          "no GPU with data/openwebtext prepared; others: --preset small, --preset paper"))
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset}: {', '.join(PRESETS)}")
    values = PRESETS[preset] | given | {"preset": preset}
    model_config, config = (cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in (GPTConfig, TrainConfig))
    config.out_dir = config.out_dir or f"out/{preset}-{model_config.pos}"
    return model_config, config, given, resume


def pick_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name}: cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device, or torch was built without CUDA")
    return name


def pick_dtype(name, device):
    """bfloat16 where the device multiplies it fast; never float16."""
    if name not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"unknown dtype {name}: auto, bfloat16 or float32")
    if name != "auto":
        return getattr(torch, name)
    if torch.device(device).type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        checks = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        fast = device == "cpu" and any(getattr(torch.cpu, check, lambda: False)() for check in checks)
    return torch.bfloat16 if fast else torch.float32


def autocast(device, dtype):
    """The context of a forward pass: bfloat16 autocast where dtype says so."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def device_name(device):
    """What a run was measured on, in words."""
    cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"


def can_compile(device):
    """Try torch.compile on a small function: it needs a C++ compiler on CPU, Triton on CUDA."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
        return True
    except Exception as e:      # whatever the compiler stack raises
        print(f"torch.compile does not work here ({type(e).__name__}); running without it")
        return False


def make_optimizer(model, config, device):
    """Fused AdamW. Weight decay on matrices only, and not on positional parameters: decay would pull angles to zero."""
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and not is_positional(n)]
    plain = [p for n, p in model.named_parameters() if p.dim() < 2 or is_positional(n)]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr at the last step."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    done = (step - config.warmup_iters) / max(1, config.max_iters - 1 - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * (config.learning_rate - config.min_lr)


def flops_per_token(model, block_size):
    """6 per matmul weight (the tied head counts, the embedding look-up does not) + 12 L C T for attention, as in PaLM."""
    c = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)))
    return 6 * weights + 12 * c.n_layer * c.n_embd * block_size


def mfu(model, block_size, tokens_per_second, where):
    """Model FLOPs utilisation: the share of the device's bf16 peak that training at this rate uses. None if the peak is not known."""
    peak = next((tflops for word, tflops in PEAK_TFLOPS.items() if word in where), None)
    return tokens_per_second * flops_per_token(model, block_size) / (peak * 1e12) if peak else None


def device_memory(device):
    """Bytes of memory that the device has in all, for this rank."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except (AttributeError, ValueError, OSError):                            # no such question here
        return math.inf


def training_memory(model, block_size, batch_size, context):
    """-> function from the sequences in a micro-batch, at most batch_size, to the bytes that a training step takes.

    Weights, gradients and AdamW's moments; a chunk of logits; and what the layers keep for the backward pass, counted in a
    forward pass of one sequence and of two under context(), for any scheme; torch.compile keeps less. On top the allocator's fragmentation: on
    CPU it is up to 40 % (the count itself is within 2 % of the peak where memory goes back at once), on CUDA taken as 10 %.
    """
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def kept(batch):
        held = {}
        def pack(t):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()                                                # t itself would hold on to its own graph
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), context():
            x = model.hidden(torch.zeros(batch, block_size, dtype=torch.int64, device=model.wte.weight.device))
        return sum(size for pointer, size in held.items() if pointer not in weights) + x.nbytes   # x keeps the graph alive till here
    one = kept(1)
    two = kept(2) if batch_size > 1 else 2 * one
    state = sum(16 * p.numel() for p in model.parameters())
    logits = lambda batch: 16 * min(LOGITS_AT_ONCE, batch * block_size * model.config.vocab_size)
    slack = 1.1 if model.wte.weight.is_cuda else 1.4
    return lambda batch: slack * (state + one + (two - one) * (batch - 1) + logits(batch))


def to_device(arrays, device):
    """int64 arrays -> tensors on the device, copied while it computes."""
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    return [t.pin_memory().to(device, non_blocking=True) if "cuda" in device else t.to(device) for t in tensors]


def ranks():
    """-> rank and world size of this process: 0 and 1 without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def say(*words, **how):
    """Print, on one rank only."""
    if ranks()[0] == 0:
        print(*words, **how)


def join_ranks(device):
    """Under torchrun: join the process group, with a GPU for each rank. -> device, rank, world size."""
    device = pick_device(device)
    if "RANK" in os.environ:
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if "cuda" in device else "gloo")
    return device, *ranks()


def leave_ranks(code=0):
    """Under torchrun, end this rank when all are done, without tearing down gloo's threads: one exit in ten aborts there."""
    if ranks()[1] > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)


def main(argv=None):
    # -- configuration, data, model: bad input ends here, before anything is written
    try:
        model_config, config, given, resume = parse_args(argv)
        out, saved = Path(config.out_dir), None
        ckpt = out / "ckpt.pt"
        if resume:
            model, saved = load_model(ckpt)
            for name, old in saved["model_config"].items():
                if name in given and given[name] != old:
                    raise ValueError(f"{ckpt} was trained with {name} {old}, not {given[name]}; leave --{name} out, "
                                     "or choose another --out_dir")
            model_config = model.config
            given = {name: value for name, value in given.items() if name not in saved["model_config"]}
            config = replace(TrainConfig(**saved["train_config"]), **given | {"out_dir": config.out_dir})
        elif ckpt.exists():
            raise ValueError(f"{ckpt} exists: --resume continues it; choose another --out_dir, or delete it to start again")
        device, rank, world = join_ranks(config.device)
        sequences = config.batch_size * config.gradient_accumulation_steps   # of a step, over all ranks and micro-batches
        if sequences % world:
            raise ValueError(f"{config.batch_size} x {config.gradient_accumulation_steps} sequences per step cannot be shared by {world} ranks")
        dtype = pick_dtype(config.dtype, device)
        if rank == 0:
            data.find(config.data)                                           # one rank prepares the default corpus
        if world > 1:
            dist.barrier()
        folder = data.find(config.data)
        train_tokens, val_tokens = (data.load(folder, split, config.block_size + 1) for split in ("train", "val"))
        vocab_size = data.vocabulary(folder)
        if not resume and "vocab_size" not in given:
            model_config.vocab_size = -(-vocab_size // 64) * 64              # a multiple of 64 is faster
        if model_config.vocab_size < vocab_size:
            raise ValueError(f"{folder} has token ids up to {vocab_size - 1:,}, the model only {model_config.vocab_size:,} rows")
        if not resume:
            torch.manual_seed(config.seed)
            model = GPT(model_config)
        out.mkdir(parents=True, exist_ok=True)
        log_file = open(out / "log.jsonl" if rank == 0 else os.devnull, "a+" if resume else "w")
    except (ValueError, OSError) as e:
        die(e)

    # TF32 for a float32 run; under bfloat16 autocast only the transport multiplies in float32, and needs the bits
    torch.set_float32_matmul_precision("high" if dtype == torch.float32 else "highest")
    model.to(device)
    optimizer = make_optimizer(model, config, device)
    step, best = 0, None
    if resume:
        optimizer.load_state_dict(saved["optimizer"])
        step, best = saved["step"], saved["best_val_loss"]
        if rank == 0:                                                        # forget what came after the checkpoint, and half a line
            log_file.seek(0)
            kept = [line for line in log_file if line.endswith("\n") and json.loads(line).get("step", 0) <= step]
            log_file.truncate(0)
            log_file.writelines(kept)
            log_file.flush()
    use_compile = ("cuda" in device if config.compile is None else config.compile) and can_compile(device)
    run = torch.compile(model) if use_compile else model
    if world > 1:
        torch._dynamo.config.optimize_ddp = False                            # its splitting refuses the checkpointed loss in older releases
        run = DistributedDataParallel(run, device_ids=[device] if "cuda" in device else None)
    low = partial(autocast, device, dtype)
    alone = lambda: run.no_sync() if world > 1 else nullcontext()            # a backward pass whose gradients stay on this rank
    tokens_per_step = sequences * config.block_size
    where = device_name(device)
    total, positional = model.num_params()

    say(f"{model_config.pos}: {model_config.n_layer} layers x {model_config.n_embd}, {total / 1e6:.2f}M parameters "
        f"({positional:,} positional), context {config.block_size}, {folder}\n"
        f"{f'{world} x ' if world > 1 else ''}{where}, {str(dtype)[6:]}{', compiled' if use_compile else ''}, "
        f"{tokens_per_step:,} tokens per step, {config.max_iters:,} steps{f', resumed at {step:,}' if resume else ''} -> {out}", flush=True)

    # -- what it will take: micro-batches that fit the device, and a rehearsal of one for the time
    share = sequences // world                                               # of a step, on this rank
    need, room = training_memory(model, config.block_size, min(config.batch_size, share), low), device_memory(device)
    while not resume and "batch_size" not in given and config.batch_size % 2 == 0 and need(min(config.batch_size, share)) > room:
        config.batch_size, config.gradient_accumulation_steps = config.batch_size // 2, config.gradient_accumulation_steps * 2
    micro = torch.zeros(min(config.batch_size, share), config.block_size, dtype=torch.int64, device=device)
    for _ in range(2):                                                       # the first compiles, and starts kernels up
        started = time.perf_counter()
        with alone():
            with low():
                loss = run(micro, micro.clone())[1]
            loss.backward()
        loss.item()                                                          # waits for the device
        seconds = (time.perf_counter() - started) * share / len(micro) * (config.max_iters - step)
    optimizer.zero_grad(set_to_none=True)
    say(f"micro-batches of {len(micro)}: about {need(len(micro)) / 1e9:.1f} of {room / 1e9:.0f} GB{' a process' if world > 1 else ''}; "
        f"all steps: about {data.clock(seconds)}", flush=True)

    def fail(message):
        last_good = f"{ckpt} is the last good checkpoint" if ckpt.exists() else "there is no checkpoint yet"
        say(f"error: {message}; {last_good}", file=sys.stderr)
        raise SystemExit(1)

    def log(**entry):
        try:
            log_file.write(json.dumps(entry) + "\n")
            log_file.flush()
        except OSError as e:                                                 # such as a full disk
            fail(f"{log_file.name} cannot be written: {e}")

    log(step=step, model_config=asdict(model_config), train_config=asdict(config), params=total, device=where,
        dtype=str(dtype)[6:], compile=use_compile, torch=torch.__version__)

    def over_ranks(value):
        """Sum of a number over all ranks."""
        if world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.item()

    @torch.no_grad()
    def validate():
        """Mean loss (nats per token) over eval_iters fixed batches, shared out over ranks."""
        model.eval()
        total = 0.0
        for i in range(rank, config.eval_iters, world):
            x, y = to_device(data.batch(val_tokens, i, EVAL_SEED, batch_size=EVAL_BATCH, block_size=config.block_size), device)
            with low():
                total += model(x, y)[1].item()
        model.train()
        return over_ranks(total) / config.eval_iters

    def checkpoint_now():
        if rank:
            return
        try:
            with data.written_whole(ckpt, "wb", "partial") as f:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "best_val_loss": best,
                            "model_config": asdict(model_config), "train_config": asdict(config)}, f)
        except (OSError, RuntimeError) as e:                                 # such as a full disk
            fail(f"step {step:,} could not be saved: {e}")

    stop = []                                                                # the signal received; a second one kills
    def on_signal(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

    if step >= config.max_iters:
        say(f"nothing to do: {ckpt} is at step {step:,}; --max_iters asks for more")

    # -- the loop: step is the number of updates done
    model.train()
    losses, started, timed, halt = [], time.perf_counter(), step, False
    while step < config.max_iters and not halt:
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = data.batch(train_tokens, step, config.seed, rank, world, block_size=config.block_size, batch_size=sequences)
        if max(x.max(), y.max()) >= model_config.vocab_size:
            die(f"{folder}/train.bin holds a token id {max(x.max(), y.max()):,}, beyond the vocabulary of {model_config.vocab_size:,}")
        x, y = to_device((x, y), device)
        loss_sum, done = 0.0, 0
        for micro_x, micro_y in zip(x.split(config.batch_size), y.split(config.batch_size)):
            done += len(micro_x)
            with alone() if done < len(x) else nullcontext():                # gradients meet in the last backward
                with low():
                    loss = run(micro_x, micro_y)[1] * (len(micro_x) / len(x))
                loss.backward()
            loss_sum += loss.detach()
        losses.append(over_ranks(loss_sum.item()) / world)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf))
        if not math.isfinite(losses[-1] + norm):                             # before it can reach the weights
            fail(f"the loss at step {step + 1:,} is {losses[-1]}, its gradient norm {norm}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        halt = over_ranks(len(stop)) > 0                  # all ranks stop after the same step

        last = step == config.max_iters
        if step % config.log_interval == 0 or last:
            seconds = (time.perf_counter() - started) / (step - timed)
            rate = tokens_per_step / seconds
            share_of_peak = mfu(model, config.block_size, rate / world, where)
            shown = f" | MFU {100 * share_of_peak:.1f}%" if share_of_peak else ""
            say(f"step {step:,}/{config.max_iters:,} ({100 * step / config.max_iters:.0f}%) | loss {np.mean(losses):.4f} | lr {lr:.1e} | "
                f"{1000 * seconds:.0f} ms | {rate:,.0f} tok/s{shown} | ETA {data.clock(seconds * (config.max_iters - step))}", flush=True)
            log(step=step, loss=float(np.mean(losses)), lr=lr, grad_norm=norm, ms=1000 * seconds, tokens_per_second=rate)
            losses, started, timed = [], time.perf_counter(), step
        if last or config.eval_interval and step % config.eval_interval == 0:
            paused = time.perf_counter()
            val_loss = validate()
            if not math.isfinite(val_loss):
                fail(f"the validation loss at step {step:,} is {val_loss}")
            best = val_loss if best is None else min(best, val_loss)
            checkpoint_now()
            say(f"step {step:,}: validation loss {val_loss:.4f}, perplexity {math.exp(min(val_loss, 700)):.2f}, saved {ckpt}", flush=True)
            log(step=step, val_loss=val_loss, best_val_loss=best)
            started += time.perf_counter() - paused                          # validation is not part of the step time
    if halt:
        stop.append(signal.SIGTERM)                                          # on ranks that were not told
        checkpoint_now()
        say(f"signal {stop[0]}: saved step {step:,}; continue with --resume --out_dir {out}", flush=True)
    code = 128 + stop[0] if halt else 0
    leave_ranks(code)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
