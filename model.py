"""The decoder: pre-norm, no biases, GELU MLP, tied embedding and head. The defaults of GPTConfig are the paper's model.

Nothing here depends on the training context, and nothing on the positional scheme but three lines: the shared transport in GPT,
the layer's transport in Attention, and the call that replaces F.scaled_dot_product_attention. See transport.py.
"""
import math
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from transport import LayerTransport, SharedTransport, parse

LOGITS_AT_ONCE = 2 ** 26   # logits in memory at a time (256 MB in fp32): 1,334 rows of the GPT-2 vocabulary


@dataclass
class GPTConfig:
    pos: str = field(default="accum_qkv", metadata={"help": "positional scheme: ROTATION, BIAS or ROTATION+BIAS"})
    n_layer: int = field(default=16, metadata={"help": "layers"})
    n_head: int = field(default=12, metadata={"help": "attention heads"})
    n_embd: int = field(default=768, metadata={"help": "width"})
    vocab_size: int = field(default=50304, metadata={"help": "rows of the embedding, at least the data's vocabulary"})
    sigma: float = field(default=0.3, metadata={"help": "spread of random and initial learned step angles (radians)"})
    rope_base: float = field(default=10000.0, metadata={"help": "RoPE's base"})
    qk_norm: bool = field(default=False, metadata={"help": "RMS-normalise queries and keys (before transport, no gain)"})

    def __post_init__(self):
        parse(self.pos)
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        for name in ("n_layer", "n_head", "n_embd", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.qk_norm = config.n_head, config.qk_norm
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.transport = LayerTransport(config.pos, config.n_embd, config.n_head, config.sigma)

    def forward(self, x, shared, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)   # each (B, H, T, d)
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = self.transport(q, k, v, x, shared, cache)                                   # (B, H, T, d)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 4 * config.n_embd, bias=False), nn.GELU(),
                                 nn.Linear(4 * config.n_embd, config.n_embd, bias=False))

    def forward(self, x, shared, cache=None):
        x = x + self.attn(self.ln_1(x), shared, cache)
        return x + self.mlp(self.ln_2(x))


def in_chunks(f, x, y, rows):
    """f of `rows` rows of x and y at a time, joined."""
    return torch.cat([f(x[i:i + rows], y[i:i + rows]) for i in range(0, len(y), rows)])


in_chunks_not_compiled = torch.compiler.disable(in_chunks)   # torch.compile would unroll the loop, anew for every length


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.transport = SharedTransport(config.pos, config.vocab_size, config.n_head, config.n_embd // config.n_head,
                                         config.sigma, config.rope_base)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        std = 0.02 * math.sqrt(768 / config.n_embd)         # GPT-2's 0.02 at its width; fan-in scaling at others
        for name, module in self.named_modules():           # residual projections smaller, transport as it says
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("c_proj", "mlp.2"))
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * config.n_layer) if residual else std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            for name, std in getattr(module, "init_std", {}).items():
                nn.init.normal_(getattr(module, name).weight, std=std)

    def num_params(self):
        """-> (all parameters, those of the positional scheme). Frozen angle tables are buffers and do not count."""
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        return sum(sizes.values()), sum(n for name, n in sizes.items() if is_positional(name))

    def hidden(self, idx, cache=None):
        """Token ids (B, T) -> final normalised hidden states (B, T, C).

        cache from `new_cache`: idx are the tokens that follow those it holds, any number at first, then one at a time.
        """
        x = self.wte(idx)
        *layers, shared_cache = cache or [None] * (len(self.h) + 1)
        shared = self.transport(idx, torch.promote_types(x.dtype, torch.float32), shared_cache)
        for block, layer_cache in zip(self.h, layers):
            x = block(x, shared, layer_cache)
        return self.ln_f(x)

    def new_cache(self):
        """An empty cache: a dict per layer (transported keys and values, running transport) and one for the shared transport."""
        return [{} for _ in range(len(self.h) + 1)]

    def nll(self, idx, targets):
        """Negative log-likelihood (nats) of every target: idx, targets (B, T) -> (B, T), float32 or wider.

        Logits exist for LOGITS_AT_ONCE // vocab_size rows at a time, also in training, where later chunks are recomputed.
        """
        x, y = self.hidden(idx).flatten(0, 1), targets.flatten()
        rows = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(y) <= rows:
            nll = self._chunk_nll(x, y)
        elif torch.is_grad_enabled():
            nll = in_chunks(lambda *a: checkpoint(self._chunk_nll, *a, use_reentrant=False), x, y, rows)
        else:
            nll = in_chunks_not_compiled(self._chunk_nll, x, y, rows)
        return nll.view(targets.shape)

    def _chunk_nll(self, x, y):
        logits = F.linear(x, self.wte.weight)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y, reduction="none")

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) -> (logits, loss): with targets (None, mean loss), without (logits of the last position (B, 1, V), None)."""
        if targets is not None:
            return None, self.nll(idx, targets).mean()
        return F.linear(self.hidden(idx, cache)[:, -1:], self.wte.weight), None

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=None):
        """Append n sampled tokens to idx (B, T) -> (B, T + n), O(T) work a token. temperature 0 takes the likeliest token."""
        cache, new = self.new_cache(), idx
        for _ in range(n):
            logits = self(new, cache=cache)[0][:, -1].float()
            if top_k is not None:
                logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -math.inf
            new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1) if temperature > 0 else logits.argmax(-1, keepdim=True)
            idx = torch.cat((idx, new), dim=1)
        return idx


def is_positional(name):
    """Does the parameter `name` belong to the positional scheme? (No weight decay there.)"""
    return "transport." in name


def load_model(path, device="cpu"):
    """Read a checkpoint of train.py (plain dicts and tensors) -> (GPT in eval mode on device, the checkpoint's dict).

    Raises ValueError, naming the file, if there is none, or it is truncated, or of something else.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no checkpoint at {path}: train one with train.py --out_dir {Path(path).parent}")
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as e:
        raise ValueError(f"{path} is not a readable checkpoint ({str(e).splitlines()[0][:120]})")
    try:
        model = GPT(GPTConfig(**saved["model_config"]))
        model.load_state_dict(saved["model"])
        saved["train_config"], saved["step"]
    except (KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{path} is not a checkpoint of this model ({str(e).splitlines()[0][:120]})")
    return model.to(device).eval(), saved
