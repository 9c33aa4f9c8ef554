"""Train a decoder under one positional scheme:  python train.py --pos accum_qkv

Runs on a bare laptop (preset tiny: the standard library as bytes, a few minutes on two cores), on CUDA, and on several
processes under torchrun. Every field of GPTConfig and TrainConfig is a flag; a preset sets several at once, and flags
given by hand win. --resume continues a run exactly.
"""
import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
if not hasattr(data, "describe"):     # until data.py has these
    data.describe = lambda folder: ("bytes", data.vocabulary(folder))
    data.check_encoding = lambda folder, encoding: None
from model import GPT, GPTConfig, is_positional, load_model
from transport import SCHEMES

try:
    import fcntl
except ImportError:          # on Windows nothing keeps two runs out of one folder
    fcntl = None

PRESETS = {
    "tiny": dict(n_layer=4, n_head=2, n_embd=128, data="stdlib", block_size=256, batch_size=16, max_iters=1200,
                 learning_rate=3e-3, min_lr=3e-4, warmup_iters=50),
    "small": dict(n_layer=8, n_head=6, n_embd=384, data="stdlib", block_size=512, batch_size=32, max_iters=2000,
                  learning_rate=1e-3, min_lr=1e-4, warmup_iters=100),
    "paper": dict(n_layer=16, n_head=12, n_embd=768, data="openwebtext", block_size=512, batch_size=64,
                  gradient_accumulation_steps=16, max_tokens=3e9, eval_iters=100, learning_rate=6e-4, min_lr=6e-5,
                  warmup_iters=500),
}
# Peak TFLOP/s in bfloat16, dense, from the data sheets. The key is the whole name that torch.cuda.get_device_name gives,
# less "NVIDIA ", so that a device with another name (a laptop's, a slice of one) shows no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 989, "H200": 989, "H200 NVL": 835, "H800": 989, "H800 PCIe": 756,
    "H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835, "L40S": 362, "L40": 181, "L4": 121,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312, "GeForce RTX 4090": 165, "GeForce RTX 3090": 71,
}
EVAL_SEED, EVAL_BATCH = 2 ** 32 - 1, 16      # validation is the same for every run, whatever its seed and micro-batches


# ---------------------------------------------------------------------------------------------------------------------
# Configuration

def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class TrainConfig:
    preset: str = option("auto", "tiny, small or paper; auto is paper on CUDA with OpenWebText prepared, else tiny")
    data: str = option("stdlib", "data set: a name under data/, or a folder with train.bin and val.bin")
    out_dir: str = option("", "where the checkpoint and the log go (empty: out/PRESET-POS, or out/PRESET-POS-seedN)")
    block_size: int = option(256, "training context in tokens; nothing in the model is sized by it")
    batch_size: int = option(32, "sequences per micro-batch")
    gradient_accumulation_steps: int = option(1, "micro-batches per iter, over all processes")
    max_iters: int = option(1000, "iters in all")
    max_tokens: float = option(0, "tokens to train on in all, in place of max_iters (0: as max_iters says)")
    learning_rate: float = option(2e-3, "peak of the cosine schedule")
    min_lr: float = option(2e-4, "its end")
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
    dtype: str = option("auto", "bfloat16 (autocast) or float32; auto is bfloat16 where the device is fast at it")
    compile: bool = option(None, "torch.compile; default on CUDA only")

    def __post_init__(self):
        kinds = {str: (str,), int: (int,), float: (float, int), bool: (bool, type(None))}
        above_zero = ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_iters",
                      "log_interval", "learning_rate")
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) not in kinds[f.type]:
                raise ValueError(f"{f.name} must be of type {f.type.__name__}, not {type(value).__name__}")
            if f.type in (int, float) and not 0 <= value < 2 ** 62:
                raise ValueError(f"{f.name} must be a number from 0 to 2^62, got {value}")
            if f.name in above_zero and value == 0:
                raise ValueError(f"{f.name} must be above 0")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1 and beta2 must be less than 1, got {self.beta1} and {self.beta2}")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr {self.min_lr} is above learning_rate {self.learning_rate}: give both")
        if self.max_tokens:
            tokens_per_iter = self.batch_size * self.gradient_accumulation_steps * self.block_size
            self.max_iters = math.ceil(self.max_tokens / tokens_per_iter)


def parse_args(argv=None):
    """-> (values of a new run, those of them given by hand, resume)."""
    schemes = "\n".join(f"  {name:<16} {s.kind}: {s.about}" for name, s in SCHEMES.items())
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                         epilog=f"schemes for --pos (ROTATION, BIAS or ROTATION+BIAS):\n{schemes}")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out_dir; flags given by hand hold "
                        "from there on, but its model and its seed stay")
    for cls in (GPTConfig, TrainConfig):
        group = parser.add_argument_group(cls.__name__)
        for f in fields(cls):
            kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
            text = f"{f.metadata['help']} (default: {f.default})"
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind)
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if "max_iters" in given:
        given.setdefault("max_tokens", 0)

    preset = given.get("preset", "auto")
    if preset == "auto":
        ready = torch.cuda.is_available() and Path("data/openwebtext/train.bin").exists()
        preset = "paper" if ready else "tiny"
        print0(f"preset {preset}: data/openwebtext and a GPU are {'there' if ready else 'not there'}; "
               f"others by --preset {', '.join(PRESETS)}")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset}: {', '.join(PRESETS)}")
    values = asdict(TrainConfig()) | {"pos": GPTConfig.pos} | PRESETS[preset] | given | {"preset": preset}
    seed = "" if values["seed"] == 1 else f"-seed{values['seed']}"
    values["out_dir"] = values["out_dir"] or f"out/{preset}-{values['pos']}{seed}"
    return values, given, resume


def configs(values):
    """-> GPTConfig and TrainConfig with these values."""
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in (GPTConfig, TrainConfig)]


def resumed_values(saved, given, ckpt):
    """The values of a checkpoint's run, under those given by hand. Raises ValueError where that cannot be."""
    old = saved.get("train_config")
    if not isinstance(old, dict) or old.keys() != {f.name for f in fields(TrainConfig)}:
        raise ValueError(f"{ckpt} is of another version of train.py: choose another --out_dir")
    old = saved["model_config"] | old
    for name in [*saved["model_config"], "seed"]:
        if given.get(name, old[name]) != old[name]:
            raise ValueError(f"{ckpt} was trained with {name} {old[name]}, not {given[name]}; leave --{name} out, "
                             "or choose another --out_dir")
    return old | given


# ---------------------------------------------------------------------------------------------------------------------
# Device and ranks

def pick_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name}: cpu, cuda or cuda:N")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name} cannot be used on this machine: {str(e).partition(chr(10))[0]}")
    return name


def pick_dtype(name, device):
    """bfloat16 where the device multiplies it fast; never float16."""
    if name not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"unknown dtype {name}: auto, bfloat16 or float32")
    if name != "auto":
        return getattr(torch, name)
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
    return torch.cuda.get_device_name(device) if "cuda" in device else f"CPU, {torch.get_num_threads()} threads"


def can_compile(device):
    """Try torch.compile on a small function: it needs a C++ compiler on CPU, Triton on CUDA."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
        return True
    except Exception as e:      # whatever the compiler stack raises
        print0(f"torch.compile does not work here ({type(e).__name__}); running without it")
        return False


def ranks():
    """-> rank and world size of this process, as torchrun sets them; 0 and 1 without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print0(*words, **how):
    """Print, on one rank only."""
    if ranks()[0] == 0:
        print(*words, **how, flush=True)


def join_ranks(device):
    """Under torchrun: join the process group, with a GPU for each rank. -> device, rank, world size."""
    device = pick_device(device)
    rank, world_size = ranks()
    if world_size > 1:
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device, rank, world_size


def over_ranks(value):
    """Sum of a number over all ranks: the hosts agree on it, whatever their devices are doing."""
    if ranks()[1] == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def leave_ranks(code=0):
    """Under torchrun, end this rank when all are done, without tearing down gloo's threads: one in ten aborts there."""
    if ranks()[1] > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer, schedule, speed

def make_optimizer(model, config):
    """Fused AdamW. Weight decay on matrices only, and not on positional parameters: decay would pull angles to zero."""
    groups = [{"params": [], "weight_decay": config.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or is_positional(name)
        groups[plain]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def load_moments(optimizer, saved):
    """Take AdamW's moments from its saved state_dict; the settings stay those of the configuration.

    Raises ValueError where the moments are not those of the optimizer's parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        state = saved["state"]
        shapes = [(state[i]["exp_avg"].shape, state[i]["exp_avg_sq"].shape) for i in range(len(parameters))]
        if shapes != [(p.shape, p.shape) for p in parameters]:
            raise ValueError("shapes")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("the checkpoint's optimizer state is not that of its model: choose another --out_dir")


def learning_rate(iter_num, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr at the last iter."""
    if iter_num < config.warmup_iters:
        return config.learning_rate * (iter_num + 1) / config.warmup_iters
    done = (iter_num - config.warmup_iters) / max(1, config.max_iters - 1 - config.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.min_lr + cosine * (config.learning_rate - config.min_lr)


def flops_per_token(model, block_size):
    """6 per matmul weight (the tied head counts, look-ups do not) + 12 L C T for attention, as in PaLM."""
    c = model.config
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * (linear + model.wte.weight.numel()) + 12 * c.n_layer * c.n_embd * block_size


def mfu(model, block_size, tokens_per_second, name):
    """Model FLOPs utilisation: the fraction used of the bf16 peak of a device of this name; None if that is unknown."""
    peak = PEAK_TFLOPS.get(name.removeprefix("NVIDIA "))
    return tokens_per_second * flops_per_token(model, block_size) / (peak * 1e12) if peak else None


# ---------------------------------------------------------------------------------------------------------------------
# A run: set-up, batches, update, validation, log, checkpoint

def open_log(out):
    """The log of a run, which belongs to this process as long as it lives: two runs cannot share a folder.

    Raises ValueError if another process has it.
    """
    if ranks()[0]:
        return open(os.devnull, "a+b", buffering=0)
    out.mkdir(parents=True, exist_ok=True)
    log_file = open(out / "log.jsonl", "a+b", buffering=0)
    try:
        if fcntl:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another training is running in {out}: wait for its end, or choose another --out_dir")
    except OSError:
        pass                                                 # a file system that has no locks
    return log_file


def belongs(line, iter_num):
    """Can this line of a log be read, and is it from no later than iter_num?"""
    try:
        return json.loads(line)["iter_num"] <= iter_num
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class Run:
    def __init__(self, argv=None):
        """From the command line, or from a checkpoint. Bad input raises ValueError or OSError, with nothing written."""
        values, given, resume = parse_args(argv)
        self.out = Path(values["out_dir"])
        self.ckpt = ckpt = self.out / "ckpt.pt"
        self.iter_num, self.best_val_loss, self.log_file = 0, None, None
        if ckpt.exists():
            if not resume:
                raise ValueError(f"{ckpt} exists: --resume continues it; choose another --out_dir, or delete it")
            self.log_file = open_log(self.out)               # from here on no one else changes the checkpoint
        if resume:
            model, saved = load_model(ckpt)
            values = resumed_values(saved, given, ckpt) | {"out_dir": values["out_dir"]}
            self.iter_num, self.best_val_loss = saved["iter_num"], saved["best_val_loss"]
        self.model_config, self.config = configs(values)
        self.share_out()
        self.open_data(saved["encoding"] if resume else None, "vocab_size" in values)
        if not resume:
            torch.manual_seed(self.config.seed)
            model = GPT(self.model_config)
        self.raw_model = model.to(self.device).train()
        self.optimizer = make_optimizer(model, self.config)
        if resume:
            load_moments(self.optimizer, saved["optimizer"])
        self.wrap_model()
        self.start_log()

    def share_out(self):
        """The sequences of an iter over all ranks; the device of this one."""
        config, world_size = self.config, ranks()[1]
        self.sequences = config.batch_size * config.gradient_accumulation_steps
        if self.sequences % world_size:
            raise ValueError(f"{config.batch_size} x {config.gradient_accumulation_steps} sequences per iter cannot be "
                             f"shared by {world_size} ranks")
        self.device, self.rank, self.world_size = join_ranks(config.device)
        self.dtype = pick_dtype(config.dtype, self.device)
        self.ctx = autocast(self.device, self.dtype)

    def open_data(self, encoding, sized):
        """encoding: of the text so far, if any; sized: whether the model's vocab_size is settled, else it is the data's."""
        if self.rank == 0:
            data.find(self.config.data)                      # one rank prepares the default corpus
        over_ranks(0)                                        # while the others wait
        self.folder = folder = data.find(self.config.data)
        self.encoding, self.vocab_size = data.describe(folder)
        if encoding:
            data.check_encoding(folder, encoding)
        if not sized:
            self.model_config = replace(self.model_config, vocab_size=self.vocab_size)
        if self.model_config.vocab_size < self.vocab_size:
            raise ValueError(f"{folder} has {self.vocab_size:,} token ids, more than vocab_size "
                             f"{self.model_config.vocab_size:,}: leave --vocab_size out")
        self.train_tokens, self.val_tokens = [
            data.load(folder, split, self.config.block_size + 1, self.vocab_size) for split in ("train", "val")]

    def wrap_model(self):
        """self.model: raw_model, compiled and over all ranks."""
        # TF32 for a float32 run; under bfloat16 autocast only the transport multiplies in float32, and needs the bits
        torch.set_float32_matmul_precision("high" if self.dtype == torch.float32 else "highest")
        on_cuda = "cuda" in self.device
        wanted = on_cuda if self.config.compile is None else self.config.compile
        self.compiled = wanted and can_compile(self.device)
        self.model = torch.compile(self.raw_model) if self.compiled else self.raw_model
        if self.world_size > 1:
            torch._dynamo.config.optimize_ddp = False        # older releases cannot split the checkpointed loss
            self.model = DistributedDataParallel(self.model, device_ids=[self.device] if on_cuda else None)

    def start_log(self):
        """From here on, files change. What a log holds from after the checkpoint is dropped, and what cannot be read."""
        self.log_file = self.log_file or open_log(self.out)
        self.log_file.seek(0)
        lines = [line for line in self.log_file if self.iter_num and belongs(line, self.iter_num)]
        self.log_file.truncate(0)
        self.log_file.writelines(lines)

        config, total = self.config, self.raw_model.num_params()
        self.where = device_name(self.device)
        self.tokens_per_iter = self.sequences * config.block_size
        how = f"{self.world_size} x {self.where}, {str(self.dtype)[6:]}{', compiled' if self.compiled else ''}"
        print0(f"{self.model_config.pos}: {total[0]:,} parameters ({total[1]:,} positional), {self.folder} -> {self.out}")
        print0(f"{how}: {self.iter_num:,} of {config.max_iters:,} iters done, {self.tokens_per_iter:,} tokens each")
        self.log(iter_num=self.iter_num, model_config=asdict(self.model_config), train_config=asdict(config),
                 params=total[0], device=self.where, dtype=str(self.dtype)[6:], torch=torch.__version__)

        zero = torch.zeros((), device=self.device)
        self.loss_sum, self.latest, self.optimizer.found_inf = zero.clone(), torch.stack([zero] * 3), zero
        self.timed, self.started = self.iter_num, time.perf_counter()

    def fail(self, message):
        print0(f"error: {message}; what {self.ckpt} holds, if it is there, is good", file=sys.stderr)
        raise SystemExit(1)

    def log(self, **entry):
        try:
            self.log_file.write(json.dumps(entry).encode() + b"\n")
        except OSError as e:                                 # such as a full disk
            self.fail(f"{self.log_file.name} cannot be written: {e}")

    def on_device(self, arrays):
        """int64 arrays -> tensors on the device, copied while it computes."""
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        if "cuda" in self.device:
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def batch(self):
        """-> x, y (sequences of this rank, block_size): the tokens of this iter."""
        return self.on_device(data.batch(
            self.train_tokens, self.iter_num, self.config.seed, self.rank, self.world_size,
            batch_size=self.sequences, block_size=self.config.block_size))

    def update(self, loss, lr):
        """One AdamW update with the gradients there are; the host does not wait for it.

        From the first loss or gradient on that is not finite, the device skips every update (found_inf is AdamW's own
        switch for that), and self.latest stays at the culprit, for check() to find.
        """
        if self.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.world_size
        norm = torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), self.config.grad_clip or math.inf)
        latest = torch.stack((torch.full_like(loss, self.iter_num + 1), loss, norm))
        optimizer = self.optimizer
        self.latest = torch.where(optimizer.found_inf > 0, self.latest, latest)
        optimizer.found_inf = 1.0 - self.latest.isfinite().all().float()
        self.loss_sum += loss
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def check(self):
        """Wait for the device, and stop if a loss or a gradient was not finite. -> the latest gradient norm."""
        iter_num, loss, norm = self.latest.tolist()
        if not math.isfinite(loss + norm):
            self.fail(f"the loss at iter {iter_num:,.0f} is {loss}, its gradient norm {norm}")
        return norm

    def progress(self, lr):
        """Print and log where the training is."""
        norm = self.check()
        iters = self.iter_num - self.timed
        loss = self.loss_sum.item() / iters
        seconds = (time.perf_counter() - self.started) / iters
        rate = self.tokens_per_iter / seconds
        used = mfu(self.raw_model, self.config.block_size, rate / self.world_size, self.where)
        max_iters = self.config.max_iters
        shown = [f"iter {self.iter_num:,}/{max_iters:,} ({100 * self.iter_num / max_iters:.0f}%)", f"loss {loss:.4f}",
                 f"lr {lr:.1e}", f"{1000 * seconds:.0f} ms", f"{rate:,.0f} tok/s"]
        if used:
            shown.append(f"MFU {100 * used:.1f}%")
        print0(" | ".join(shown), "| ETA", data.clock(seconds * (max_iters - self.iter_num)))
        self.log(iter_num=self.iter_num, loss=loss, lr=lr, grad_norm=norm, ms=1000 * seconds, tokens_per_second=rate)
        self.loss_sum.zero_()
        self.timed, self.started = self.iter_num, time.perf_counter()

    @torch.no_grad()
    def validate(self):
        """-> mean loss (nats per token) over eval_iters fixed batches, shared out over ranks."""
        config, total = self.config, torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(self.rank, config.eval_iters, self.world_size):
            x, y = self.on_device(data.batch(
                self.val_tokens, i, EVAL_SEED, batch_size=EVAL_BATCH, block_size=config.block_size))
            with self.ctx:
                total += self.raw_model(x, y)[1]
        return over_ranks(total.item()) / config.eval_iters

    def evaluate(self):
        """Validate, save and log the result; that is no part of the time of an iter."""
        norm, paused = self.check(), time.perf_counter()
        loss = self.validate()
        if not math.isfinite(loss):
            self.fail(f"the validation loss at iter {self.iter_num:,} is {loss}")
        self.best_val_loss = min(loss, self.best_val_loss or loss)
        self.save()
        perplexity = math.exp(min(loss, 700))
        print0(f"iter {self.iter_num:,}: validation loss {loss:.4f}, perplexity {perplexity:.2f}, saved {self.ckpt}")
        self.log(iter_num=self.iter_num, val_loss=loss, best_val_loss=self.best_val_loss)
        self.started += time.perf_counter() - paused

    def save(self):
        """Write the checkpoint, whole or not at all, on one rank."""
        self.check()
        saved = {
            "model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "iter_num": self.iter_num, "best_val_loss": self.best_val_loss,
            "model_config": asdict(self.model_config), "train_config": asdict(self.config),
            "encoding": self.encoding, "vocab_size": self.vocab_size,
        }
        try:
            if self.rank == 0:
                with data.written_whole(self.ckpt, "wb", "partial") as f:
                    torch.save(saved, f)
        except (OSError, RuntimeError) as e:                 # such as a full disk
            self.fail(f"iter {self.iter_num:,} could not be saved: {e}")


# ---------------------------------------------------------------------------------------------------------------------
# Training

def catch_signals():
    """-> a list that will hold the first SIGINT or SIGTERM; a second one kills."""
    caught = []

    def on_signal(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return caught


def train(run):
    """The training loop; run.iter_num counts the updates done. -> exit status."""
    config, model = run.config, run.model
    caught, stop = catch_signals(), False
    while run.iter_num < config.max_iters and not stop:
        x, y = run.batch()
        loss = torch.zeros((), device=run.device)
        micro_batches = list(zip(x.split(config.batch_size), y.split(config.batch_size)))
        for i, (micro_x, micro_y) in enumerate(micro_batches):
            if run.world_size > 1:                           # gradients meet in the last backward pass
                model.require_backward_grad_sync = i == len(micro_batches) - 1
            with run.ctx:
                micro_loss = model(micro_x, micro_y)[1] * (len(micro_x) / len(x))
            micro_loss.backward()
            loss += micro_loss.detach()

        lr = learning_rate(run.iter_num, config)
        run.update(loss, lr)
        run.iter_num += 1
        stop = over_ranks(len(caught)) > 0                   # all ranks stop after the same iter

        last = run.iter_num >= config.max_iters
        if last or run.iter_num % config.log_interval == 0:
            run.progress(lr)
        if last or (config.eval_interval and run.iter_num % config.eval_interval == 0):
            run.evaluate()

    if not stop:
        return 0
    run.save()
    number = (caught + [signal.SIGTERM])[0]                  # other ranks than the one told know no number
    print0(f"signal {number}: saved iter {run.iter_num:,}; continue with --resume --out_dir {run.out}")
    return 128 + number


def main(argv=None):
    try:
        run = Run(argv)
    except (ValueError, OSError) as e:
        data.die(e)
    if run.iter_num >= run.config.max_iters:
        print0(f"nothing to do: {run.ckpt} is at iter {run.iter_num:,}; --max_iters asks for more")
    status = train(run)
    run.log_file.close()
    leave_ranks(status)
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
