"""Train a decoder under one positional scheme:  python train.py --pos accum_qkv

Runs on a laptop, on CUDA, and on several ranks under torchrun. Every field of GPTConfig and TrainConfig is a
flag; a preset sets several at once, flags given by hand win. --resume continues a run exactly.
"""
import argparse
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
from model import GPT, GPTConfig, is_positional, load_model, option
from transport import KINDS, SCHEMES, parse

# On CPU numbers below 1e-38 count as zero: they make a forget gate's gradient five times slower. Said before
# any work, since threads take it over when they start.
torch.set_flush_denormal(True)

PRESETS = {
    "tiny": dict(n_layer=4, n_head=2, n_embd=128, data="stdlib", block_size=256, batch_size=16,
                 max_iters=1200, learning_rate=3e-3, min_lr=3e-4, warmup_iters=50),
    "small": dict(n_layer=8, n_head=6, n_embd=384, data="stdlib", block_size=512, batch_size=32,
                  max_iters=2000, learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    "paper": dict(n_layer=16, n_head=12, n_embd=768, data="openwebtext", block_size=512, batch_size=64,
                  gradient_accumulation_steps=16, max_iters=5723, eval_iters=100,
                  learning_rate=6e-4, min_lr=6e-5, warmup_iters=500),        # 3e9 tokens: 20 a parameter
}
# Dense bfloat16 peak in TFLOP/s, by the whole name of a device: a laptop's 4090 is another one
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 80GB HBM3": 989, "H100 NVL": 835, "H100 PCIe": 756, "L40S": 362,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "GeForce RTX 4090": 165, "GeForce RTX 3090": 71,
}
COMPILE_FROM = 1000         # iters that win back the compiler's time on CPU: accum_qkv well, rope hardly
EVAL_SEED, EVAL_BATCH = 2 ** 32 - 1, 16      # validation is the same whatever a run's seed and micro-batches
FROM_ONE = "block_size batch_size gradient_accumulation_steps max_iters eval_iters log_interval".split()


@dataclass
class TrainConfig:
    preset: str = option("auto", "tiny, small, paper; auto is paper with CUDA and OpenWebText, else tiny")
    data: str = option("stdlib", "data set: a name under data/, or a folder with train.bin and val.bin")
    out_dir: str = option("", "where checkpoint and log go (empty: out/PRESET-POS, for other seeds -seedN)")
    block_size: int = option(256, "training context in tokens; nothing in the model is sized by it")
    batch_size: int = option(32, "sequences per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per iter, over all processes")
    max_iters: int = option(1000, "iters in all")
    learning_rate: float = option(2e-3, "peak of the cosine schedule")
    min_lr: float = option(2e-4, "learning rate at the last iter")
    warmup_iters: int = option(50, "iters of linear warm-up")
    weight_decay: float = option(0.1, "on matrices, but not on positional parameters")
    beta1: float = option(0.9, "AdamW")
    beta2: float = option(0.95, "AdamW")
    grad_clip: float = option(1.0, "largest gradient norm (0: no clipping)")
    eval_interval: int = option(250, "iters between validations and saves (0: only at the end)")
    eval_iters: int = option(20, f"validation batches of {EVAL_BATCH} sequences")
    log_interval: int = option(10, "iters between log lines")
    seed: int = option(1, "of initial weights, of random angle tables and of the order of the data")
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto is cuda where there is one")
    dtype: str = option("auto", "bfloat16 (autocast), float32; auto is bfloat16 where that is fast")
    compile: bool = option(None, f"torch.compile; default on CUDA, on CPU from max_iters {COMPILE_FROM} on")

    def __post_init__(self):
        for f in fields(self):
            value, low = getattr(self, f.name), int(f.name in FROM_ONE)
            if f.type in (int, float) and not (isinstance(value, (int, float)) and low <= value < 2 ** 62):
                raise ValueError(f"{f.name} must be a number from {low} to 2^62")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr {self.min_lr} is above learning_rate {self.learning_rate}")
        self.sequences = self.batch_size * self.gradient_accumulation_steps         # of all ranks in an iter


def parse_args(argv=None):
    """-> the preset's values, those given by hand, resume."""
    schemes = "\n".join(f"  {name:<16} {scheme.kind}: {scheme.about}" for name, scheme in SCHEMES.items())
    parser = data.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"schemes for --pos ({', '.join(KINDS)}, or several joined by +):\n{schemes}")
    parser.add_argument("--resume", action="store_true",
                        help="continue the run in --out_dir; its model and preset stay, other flags hold")
    for f in fields(GPTConfig) + fields(TrainConfig):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        text = f"{f.metadata['help']} (default: {f.default})"
        parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text, **kind)
    given = vars(parser.parse_args(argv))
    resume, preset = given.pop("resume"), given.pop("preset", "auto")

    if preset == "auto":
        ready = torch.cuda.is_available() and Path("data/openwebtext/train.bin").exists()
        preset = "paper" if ready else "tiny"
        if not resume:                                       # which has the preset of the checkpoint
            print0(f"preset {preset}: auto takes paper with a GPU and data/openwebtext, else tiny")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset}: {', '.join(PRESETS)}")
    name, seed = f"{preset}-{given.get('pos', GPTConfig.pos)}", given.get("seed", 1)
    given["out_dir"] = given.get("out_dir") or f"out/{name}" + f"-seed{seed}" * (seed != 1)
    return {"preset": preset} | PRESETS[preset], given, resume


def configured(cls, values):
    """A configuration of these values; what is not among them has its default."""
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


# -----------------------------------------------------------------------------------------------------------
# Device and ranks

def pick_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.zeros(1, device=name).device.type in ("cpu", "cuda"):
            return name
    except (RuntimeError, AssertionError):
        pass                                                 # no such device here
    raise ValueError(f"--device {name} cannot be used here: cpu, or, where there is one, cuda or cuda:N")


def pick_dtype(name, device):
    """bfloat16 where the device multiplies it fast; never float16."""
    if name in ("bfloat16", "float32"):
        return getattr(torch, name)
    if name != "auto":
        raise ValueError(f"unknown dtype {name}: auto, bfloat16 or float32")
    if "cuda" in device:
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        checks = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        fast = any(getattr(torch.cpu, check, bool)() for check in checks)
    return torch.bfloat16 if fast else torch.float32


def autocast(device, dtype):
    """The context of a forward pass: bfloat16 autocast where dtype says so."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def device_name(device):
    """What a run was measured on, in words."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def can_compile(device):
    """It needs a C++ compiler on CPU, Triton on CUDA."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
        return True
    except Exception:           # whatever the compiler stack raises
        print0("torch.compile does not work here: running without it")
        return False


def ranks():
    """-> rank and world size of this process, as torchrun sets them; 0 and 1 without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print0(*words, **how):
    """Print, on one rank only."""
    if ranks()[0] == 0:
        try:
            print(*words, **how, flush=True)
        except OSError:                                      # `| tee` or a terminal has gone: go on, and save
            os.dup2(os.open(os.devnull, os.O_WRONLY), how.get("file", sys.stdout).fileno())


def join_ranks(device):
    """-> the device. Under torchrun, join the process group, too, with a GPU for each rank."""
    if ranks()[1] == 1:
        return pick_device(device)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(device)
    if "cuda" in device:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device


def over_ranks(number):
    """Mean of a number over ranks, on the hosts: no device is waited for."""
    world_size = ranks()[1]
    if world_size == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / world_size


def leave_ranks(code):
    """Under torchrun, wait for all ranks, then end without gloo's clean-up, which aborts one time in ten."""
    if ranks()[1] > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)


def make_optimizer(model, config):
    """Fused AdamW. Matrices decay, but no positional parameters: that would pull angles to zero."""
    groups = [{"params": [], "weight_decay": config.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        no_decay = parameter.dim() < 2 or is_positional(name)
        groups[no_decay]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(iter_num, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr at the last iter."""
    if iter_num < config.warmup_iters:
        return config.learning_rate * (iter_num + 1) / config.warmup_iters
    done = (iter_num - config.warmup_iters) / max(1, config.max_iters - 1 - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)


def flops_per_token(model, block_size):
    """6 per matmul weight (the tied head counts, look-ups do not) + 12 L C T for attention, as in PaLM."""
    c = model.config
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * (linear + model.wte.weight.numel()) + 12 * c.n_layer * c.n_embd * block_size


def mfu(model, block_size, tokens_per_second, name):
    """Model FLOPs utilisation: the fraction of the peak of a device of this name; None if that is unknown."""
    peak = PEAK_TFLOPS.get(name.removeprefix("NVIDIA "))
    return tokens_per_second * flops_per_token(model, block_size) / (peak * 1e12) if peak else None


def wrapped(model, config, device):
    """The model as the loop calls it: compiled, and with gradients averaged over ranks."""
    on_cuda, wanted = "cuda" in device, config.compile
    if wanted is None:                                       # not by the iters left: --resume goes on exactly
        wanted = on_cuda or config.max_iters >= COMPILE_FROM
    if wanted and can_compile(device):
        print0("torch.compile: the first iter takes longer")
        model = torch.compile(model)
    if ranks()[1] > 1:
        torch._dynamo.config.optimize_ddp = False            # older releases cannot split a checkpointed loss
        model = DistributedDataParallel(model, device_ids=[device] if on_cuda else None)
    return model


# -----------------------------------------------------------------------------------------------------------
# A run

def version(ckpt):
    """What differs once a checkpoint has been written again: None where there is none."""
    return ckpt.stat().st_mtime_ns if ckpt.exists() else None


def open_log(ckpt, found, iter_num):
    """A run's log, locked while this process lives, with the lines a resumed run wrote up to iter_num.

    found: the checkpoint's version when it was looked at, before the lock.
    """
    out = ckpt.parent
    out.mkdir(parents=True, exist_ok=True)
    log_file = open(out / "log.jsonl", "a+b", buffering=0)
    try:
        import fcntl
        fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another training runs in {out}: wait for its end, or choose another --out_dir")
    except (ImportError, OSError):                           # Windows, and network disks without locks
        pass

    if version(ckpt) != found:
        raise ValueError(f"{ckpt} was written by another training just now: start again")

    log_file.seek(0)
    kept = []
    for line in log_file:
        with suppress(Exception):
            if iter_num > 0 and json.loads(line)["iter_num"] <= iter_num:
                kept.append(line)
    kept = b"".join(kept)
    log_file.seek(0)
    if log_file.read(len(kept)) == kept:                     # as nearly always: nothing to write again
        log_file.truncate(len(kept))
    else:
        log_file.truncate(0)
        log_file.write(kept)
    return log_file


class Run:
    """A training run: what it holds, and what is done with it outside the loop."""

    def __init__(self, argv=None):
        """From flags and, with --resume, a checkpoint. Bad input: ValueError or OSError, no file changed."""
        values, given, resume = parse_args(argv)
        self.ckpt = ckpt = Path(given["out_dir"], "ckpt.pt")
        found = version(ckpt)
        if resume:
            model, saved = load_model(ckpt)
            values = saved["model_config"] | saved["train_config"]
            fixed = {*saved["model_config"], "seed"}
            if parse(model.config.pos)[2]:                   # its logits have scale 1 up to this context
                fixed.add("block_size")
            for name in given.keys() & fixed:
                if given[name] != values[name]:
                    raise ValueError(f"{ckpt} has {name} {values[name]}: leave --{name} {given[name]} out")
        elif found:
            raise ValueError(f"{ckpt} exists: --resume continues it; or choose another --out_dir")
        values |= given
        self.config = config = configured(TrainConfig, values)
        if config.sequences % ranks()[1]:
            raise ValueError(f"{config.sequences} sequences per iter cannot be shared by so many ranks")

        folder = data.find(config.data)
        self.encoding, self.vocab_size = data.describe(folder)
        if resume:
            data.check_encoding(folder, saved["encoding"])
            self.encoding = saved["encoding"]                # whatever this folder tells of itself
            self.vocab_size = max(self.vocab_size, saved["vocab_size"])
        else:
            torch.manual_seed(config.seed)
            own = {"vocab_size": self.vocab_size, "train_context": max(2, config.block_size)}
            model = GPT(configured(GPTConfig, own | values))
        limits = config.block_size + 1, model.config.vocab_size
        self.train_tokens, self.val_tokens = [data.load(folder, part, *limits) for part in ("train", "val")]

        self.device, self.world_size = join_ranks(config.device), ranks()[1]
        dtype = pick_dtype(config.dtype, self.device)
        self.ctx = autocast(self.device, dtype)
        self.raw_model = model.to(self.device).train()
        self.optimizer = make_optimizer(model, config)
        self.iter_num = 0
        if resume:
            self.load_progress(saved)
        self.log_file = open_log(ckpt, found, self.iter_num) if ranks()[0] == 0 else None
        self.model = wrapped(model, config, self.device)
        where = device_name(self.device)
        total, positional = model.num_params()
        print0(f"{model.config.pos}: {total:,} parameters ({positional:,} positional), on",
               f"{self.world_size} x {where}, {str(dtype)[6:]}")
        print0(f"{folder} -> {ckpt.parent}, context {config.block_size:,},",
               f"{config.sequences * config.block_size:,} tokens per iter")
        self.log(model_config=asdict(model.config), train_config=asdict(config), device=where)

    def load_progress(self, saved):
        """How far a checkpoint is, and AdamW's moments; its settings stay those of the configuration."""
        optimizer = self.optimizer
        try:
            self.iter_num = saved["iter_num"]
            optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]["state"]})
            if any(optimizer.state[p]["exp_avg"].shape != p.shape for p in self.raw_model.parameters()):
                raise ValueError
        except Exception:                                    # whatever a foreign one makes of that
            raise ValueError(f"{self.ckpt} has no state to resume from: choose another --out_dir")

    def log(self, **entry):
        if self.log_file:
            self.log_file.write(json.dumps(dict(iter_num=self.iter_num, **entry)).encode() + b"\n")

    def batch(self, tokens, i, seed, size, *rank):
        """-> x, y (size / world size, block_size): a rank's part, copied while the device computes."""
        arrays = data.batch(tokens, i, seed, *rank, batch_size=size, block_size=self.config.block_size)
        tensors = [torch.from_numpy(a).contiguous() for a in arrays]
        if "cuda" in self.device:
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def progress(self, lr):
        """Print and log means since the last log line. ArithmeticError: a loss or gradient was not finite."""
        config, done = self.config, self.iter_num
        loss, norm = torch.stack(self.latest).mean(0).tolist()     # here the host waits for the device
        loss = over_ranks(loss)                              # the norm is that of all ranks already
        if not math.isfinite(loss + norm):
            raise ArithmeticError(f"by iter {done:,} the loss is {loss}, the gradient norm {norm}")
        seconds = (time.perf_counter() - self.started) / len(self.latest)
        rate = config.sequences * config.block_size / seconds
        used = mfu(self.raw_model, config.block_size, rate / self.world_size, device_name(self.device))
        speed = f"{rate:,.0f} tok/s" + (f" | MFU {used:.1%}" if used else "")
        eta = data.clock(seconds * (config.max_iters - done))
        print0(f"iter {done:,}/{config.max_iters:,} ({done / config.max_iters:.0%}) | loss {loss:.4f} |",
               f"lr {lr:.1e} | {1000 * seconds:.0f} ms | {speed} | ETA {eta}")
        self.log(loss=loss, lr=lr, grad_norm=norm, tokens_per_second=rate)
        self.latest, self.started = [], time.perf_counter()

    @torch.no_grad()
    def evaluate(self):
        """Save, and log the mean loss (nats per token) over fixed batches, the same ones on every rank."""
        loss, n = 0.0, self.config.eval_iters
        for i in range(n):
            x, y = self.batch(self.val_tokens, i, EVAL_SEED, EVAL_BATCH)
            with self.ctx:
                loss += self.raw_model(x, y)[1].item() / n
        if not math.isfinite(loss):
            raise ArithmeticError(f"the validation loss at iter {self.iter_num:,} is {loss}")
        self.save()
        perplexity = math.exp(min(loss, 700))
        print0(f"iter {self.iter_num:,}: validation loss {loss:.4f}, perplexity {perplexity:.2f},",
               f"saved {self.ckpt}")
        self.log(val_loss=loss)
        self.started = time.perf_counter()                   # no part of the time of an iter

    def save(self):
        """Write the checkpoint, whole or not at all, on one rank."""
        if self.log_file is None:
            return                                           # rank 0 alone has a log
        saved = {
            "model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "iter_num": self.iter_num,
            "model_config": asdict(self.raw_model.config), "train_config": asdict(self.config),
            "encoding": self.encoding, "vocab_size": self.vocab_size,
        }
        with data.written_whole(self.ckpt, "wb") as f:
            torch.save(saved, f)


def train(run):
    """Train until max_iters, or a signal to any rank. -> exit status."""
    config, model, optimizer = run.config, run.model, run.optimizer
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):                              # print could be in the midst of a line
            os.write(2, b"stopping after this iter, to save; a second signal kills\n")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:   # Windows; nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, on_signal)

    run.latest, run.started = [], time.perf_counter()        # since the last log line
    while run.iter_num < config.max_iters:
        x, y = run.batch(run.train_tokens, run.iter_num, config.seed, config.sequences, *ranks())
        loss = torch.zeros((), device=run.device)
        micro_batches = list(zip(x.split(config.batch_size), y.split(config.batch_size)))
        for i, (micro_x, micro_y) in enumerate(micro_batches):
            if run.world_size > 1:                           # gradients meet in the last backward pass
                model.require_backward_grad_sync = i == len(micro_batches) - 1
            with run.ctx:
                micro_loss = model(micro_x, micro_y)[1] * (len(micro_x) / len(x))
            micro_loss.backward()
            loss += micro_loss.detach()

        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        lr = learning_rate(run.iter_num, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.latest.append(torch.stack((loss, norm)))         # the host does not wait for the device here
        run.iter_num += 1

        stop = over_ranks(len(caught)) > 0                   # all ranks stop after the same iter
        last = run.iter_num == config.max_iters
        evaluate = last or (config.eval_interval and run.iter_num % config.eval_interval == 0)
        if stop or evaluate or run.iter_num % config.log_interval == 0:
            run.progress(lr)
        if evaluate:
            run.evaluate()
        if stop:
            run.save()
            print0(f"saved iter {run.iter_num:,}; continue with --resume --out_dir {config.out_dir}")
            return 128 + (caught or [signal.SIGTERM])[0]     # a signal reaches one rank alone
    return 0


def main(argv=None):
    with data.one_line_errors():
        run = Run(argv)
    try:
        status = train(run)
    except (ArithmeticError, OSError) as e:                  # a number that is not finite, or a full disk
        kept = f"{run.ckpt} is that of the last save" if run.ckpt.exists() else "nothing was saved"
        print0(f"error: {e}; {kept}", file=sys.stderr)
        if isinstance(e, OSError):
            raise SystemExit(1)                              # of one rank alone: it does not wait for others
        status = 1
    leave_ranks(status)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
