"""Positions as transport: every scheme of "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975).

Attention compares a query at i with a key at j after carrying the key along the path of tokens from j to i. Schemes differ
in the step that each token contributes and in what is carried (keys, or keys and values); all of them run as
encode -> one causal F.scaled_dot_product_attention -> decode. This file needs torch alone: copy it, or any function of it.

Conventions (tested in test_all.py)
  path    from source j to query i is (j, i]: the source's own step is excluded, the query's included.
          P_{j->i} = M_i ... M_{j+1} = C_i C_j^{-1},  C_t = M_t C_{t-1}  (the new step multiplies on the left),  P_{i->i} = I.
  pairs   are half-split: channel c turns together with channel c + d/2 (Llama and GPT-NeoX checkpoints).
  sign    is RoPE's: q, k and, where carried, v are rotated by +phase, the output is rotated back by -phase.
          RoPE is the special case of a constant step, ALiBi of a constant forget gate, NoPE of a zero step.
  phase   cumulative sum of step angles (radians), summed and wrapped to (-pi, pi] in float64, then rounded to float32.
  shapes  q, k, v are (B, H, T, d); phases (B|1, H|1, T, d/2); key biases (B|1, H, T), added after the 1/sqrt(d) scale.
  norms   on q and k, if any, come before transport: a learnable gain after it would break the path law.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 64          # steps per chunk of the UT transform
BIAS_CHANNELS = 8   # extra key channels that hold a bias; keeps the head dim a multiple of 8, as fused kernels want
W_RANK, W_CONV = 32, 3   # PaTH's reflection vectors: rank of their projection, taps of their causal convolution
ANGLE_SEED = 42     # random tables come from a generator of their own: the same on every rank and for every --seed


class Scheme(NamedTuple):
    kind: str       # "rotation" or "bias"
    step: str       # where the step M_t comes from
    values: bool    # are values carried too?
    about: str


SCHEMES = {
    "nope":            Scheme("rotation", "none", False, "identity step: no positions (control)"),
    "rope":            Scheme("rotation", "constant", False, "constant angle per block (the baseline)"),
    "rope_qkv":        Scheme("rotation", "constant", True, "constant angle per block, values too (control)"),
    "random_qk":       Scheme("rotation", "random", False, "frozen random angle per token id and block"),
    "random_qkv":      Scheme("rotation", "random", True, "frozen random angle per token id and block, values too"),
    "accum_qk":        Scheme("rotation", "table", False, "learned angle per token id and block"),
    "accum_qkv":       Scheme("rotation", "table", True, "learned angle per token id and block, values too"),
    "hidden_qk":       Scheme("rotation", "hidden", False, "learned angle from the layer's input"),
    "hidden_qkv":      Scheme("rotation", "hidden", True, "learned angle from the layer's input, values too"),
    "householder_qk":  Scheme("rotation", "reflection", False, "exact reflection I - 2ww'/w'w, w from the layer's input"),
    "householder_qkv": Scheme("rotation", "reflection", True, "exact reflection from the layer's input, values too"),
    "path":            Scheme("rotation", "path", False, "PaTH: I - beta ww', beta in (0, 2), w and beta from the layer's input"),
    "alibi":           Scheme("bias", "constant", False, "key bias slope_h * j (explicit far-mass control)"),
    "fox":             Scheme("bias", "gate", False, "Forgetting Transformer: key bias -cumsum(log f), f from the layer's input"),
}


def parse(pos):
    """Split a scheme name `ROTATION`, `BIAS` or `ROTATION+BIAS` into (rotation, bias); bias is None where there is none.

    Raises ValueError with the list of schemes for any other name.
    """
    rotation, plus, bias = pos.partition("+")
    if not plus and rotation in SCHEMES and SCHEMES[rotation].kind == "bias":
        rotation, bias = "nope", rotation
    known = lambda name, kind: name in SCHEMES and SCHEMES[name].kind == kind
    if not known(rotation, "rotation") or (plus or bias) and not known(bias, "bias"):
        rotations, biases = (", ".join(n for n, s in SCHEMES.items() if s.kind == k) for k in ("rotation", "bias"))
        raise ValueError(f"unknown scheme '{pos}'; rotations: {rotations}; biases: {biases}; "
                         "'+' joins a rotation and a bias, as in accum_qkv+alibi")
    return rotation, bias or None


# ---------------------------------------------------------------------------------------------------------------------
# Functions to copy

def accumulate(steps, dtype=torch.float32):
    """Phase of every position: the running sum of step angles, wrapped to (-pi, pi].

    steps (..., T, d/2) radians, any float dtype -> (..., T, d/2) in `dtype`. Sum and wrap are in float64: a float32 sum is
    off by up to 1e-2 rad at T = 65,536, and steps in bfloat16 are useless whatever the sum (see the README).
    """
    phase = steps.cumsum(-2, dtype=torch.float64)
    turns = torch.ceil(phase.detach() * (0.5 / math.pi) - 0.5)
    return phase.sub(turns, alpha=2 * math.pi).to(dtype)


def cos_sin(phase):
    """Phase (radians) -> the pair (cos, sin), which `rotate` and `attend` take in its place: compute it once, use it often."""
    return phase if isinstance(phase, tuple) else (phase.cos(), phase.sin())


def rotate(x, phase):
    """Turn every channel pair (c, c + d/2) of x by its phase; RoPE when phase = accumulate(rope_steps(T, d)).

    x (B, H, T, d), phase (B|1, H|1, T, d/2) in radians or its `cos_sin` pair -> (B, H, T, d) in x's dtype, whatever the
    phase's; products are taken in the wider of the two. Raises ValueError on shapes that do not fit.
    """
    cos, sin = cos_sin(phase)
    if x.size(-1) != 2 * cos.size(-1) or x.size(-2) != cos.size(-2):
        raise ValueError(f"rotate: x {tuple(x.shape)} needs a phase (B|1, H|1, {x.size(-2)}, {x.size(-1)}/2), "
                         f"got {tuple(cos.shape)}")
    x1, x2 = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)


def rope_steps(T, d, base=10000.0, device=None):
    """RoPE as steps: the same angles base^(-2c/d) at every position (Su et al., arXiv 2104.09864). -> (T, d/2) float64."""
    if d % 2:
        raise ValueError(f"rope_steps: the head dim must be even, got {d}")
    angle = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    return angle.expand(T, d // 2)


def alibi_slopes(n_head, device=None):
    """ALiBi's published slopes (Press et al., arXiv 2108.12409, get_slopes): 2^(-8h/n) for a power of two n; otherwise those
    of the power of two below n, then every second one of the power of two above. -> (n_head,) float64."""
    n = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)] + [2 ** (-4 * h / n) for h in range(1, 2 * (n_head - n), 2)]
    return torch.tensor(slopes, dtype=torch.float64, device=device)


def digits(z, n=BIAS_CHANNELS):
    """Write z as a sum of n numbers that bfloat16 holds exactly: (...) float64 -> (..., n) float64, error max|z| / 256^n.

    These are the digits of z in base 256, taken with round() on a grid. Rounding by `.to(bfloat16)` instead is dropped by
    torch.compile and leaves errors up to 1e3. The gradient goes through the first part.
    """
    rest, parts = z.detach(), []
    grid = torch.exp2(torch.ceil(torch.log2((rest.abs().amax() / 256).clamp_min(1e-30))))
    for _ in range(n):
        parts.append((rest / grid).round() * grid)
        rest, grid = rest - parts[-1], grid / 256
    parts[0] = z + (parts[0] - z.detach())
    return torch.stack(parts, dim=-1)


def channels(bias, d, n=BIAS_CHANNELS):
    """-> float e, parts (..., n) with e * sum(parts) / sqrt(d) = bias: a logit as channels, constant on one side, digits on the other."""
    e = 2.0 ** round(math.log2(math.sqrt(d)))
    return e, digits(bias * (math.sqrt(d) / e), n)


def bias_channels(key_bias, d):
    """Write an additive key bias as extra channels: q gets the constant `e`, k gets `parts`, and e * sum(parts) / sqrt(d) = bias.

    key_bias (B|1, H, T), any float dtype, best float64 -> float e, parts (B|1, H, T, 8) float64, exact in bfloat16 (see `digits`).
    Softmax is blind to a constant per row, so the bias -m(i - j) may be m*j on the key alone; it is centred on the last key,
    where precision matters.
    """
    return channels(key_bias.double() - key_bias[..., -1:].detach().double(), d)


def attend(q, k, v, phase=None, rotate_values=False, key_bias=None, cache=None):
    """Causal attention under accumulated rotations and a key bias, in place of F.scaled_dot_product_attention(q, k, v, is_causal=True).

    softmax_j(q_i . P_{j->i} k_j / sqrt(d) + key_bias_j) over v_j, or over P_{j->i} v_j with rotate_values.
    q, k, v (B, H, T, d); phase (B|1, H|1, T, d/2) radians or its `cos_sin` pair; key_bias (B|1, H, T), for ALiBi slope_h * j.
    cache: a dict, empty at first, that keeps transported keys and values: the first call takes the prompt, later ones a token each;
    the phase is then that of the new tokens, the key bias that of all keys.
    -> (B, H, T, d). Any T, float64 to bfloat16, differentiable; memory O(T d) on fused kernels. Raises ValueError on bad shapes.
    """
    d, one_more = q.size(-1), holds_keys(cache, q.size(-2))
    if phase is not None:
        cos, sin = cos_sin(phase)
        q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        if rotate_values:
            v = rotate(v, (cos, sin))                                       # encode: v_j -> C_j^-1 v_j
    if cache is not None:
        k, v = extend(cache, "k", k), extend(cache, "v", v)
    if key_bias is not None:
        if key_bias.shape[1:] != k.shape[1:3] or key_bias.size(0) not in (1, k.size(0)):
            raise ValueError(f"attend: key_bias must be (B|1, H, T) = {tuple(k.shape[:3])}, got {tuple(key_bias.shape)}")
        e, parts = bias_channels(key_bias, d)
        q = F.pad(q, (0, BIAS_CHANNELS), value=e)                           # (B, H, T, d + 8)
        k = torch.cat((k, parts.to(k.dtype).expand(k.size(0), -1, -1, -1)), dim=-1)
        v = F.pad(v, (0, BIAS_CHANNELS))                                    # fused kernels want equal head dims
    o = F.scaled_dot_product_attention(q, k, v, is_causal=not one_more, scale=d ** -0.5)[..., :d]
    if phase is not None and rotate_values:
        o = rotate(o, (cos, -sin))                                          # decode: C_i
    return o


def holds_keys(cache, T):
    """Is this a later call with a cache? Raises ValueError if it is and brings more than one token."""
    if cache and "k" in cache and T != 1:
        raise ValueError(f"with {cache['k'].size(-2)} keys in the cache only one token can follow, got {T}")
    return bool(cache) and "k" in cache


def extend(cache, name, new, dim=-2):
    """Append `new` to cache[name] along dim and return the whole."""
    cache[name] = torch.cat((cache[name], new), dim) if name in cache else new
    return cache[name]


# ---------------------------------------------------------------------------------------------------------------------
# Steps that do not commute: H_t = I - beta_t w_t w_t^T, in chunks by the UT transform (compact WY form)

def ut_transform(w, beta, chunk=CHUNK):
    """Products of H_t = I - beta_t w_t w_t^T within chunks: H_i ... H_1 = I - W[:i]^T X[:i, :i] W[:i] for every i.

    w (B, H, T, d), beta (B, H, T), T a multiple of chunk -> W (B, H, N, c, d), X (B, H, N, c, c) lower triangular.
    (Bischof & Van Loan 1987; Yang et al., arXiv 2406.06484.) Needs float32 or float64: bfloat16 breaks the solve.
    """
    W, b = w.unflatten(2, (-1, chunk)), beta.unflatten(2, (-1, chunk))
    L = (b[..., None] * W @ W.mT).tril(-1)
    return W, torch.linalg.solve_triangular(L, b.diag_embed(), upper=False, unitriangular=True)


def pad_steps(T, *tensors, chunk=CHUNK):
    """Pad (B, H, T, ...) tensors with zeros to a multiple of the chunk; w = 0 is the identity step."""
    extra = -T % chunk
    return [F.pad(t, (0, 0) * (t.dim() - 3) + (0, extra)) for t in tensors]


def householder(w, start=None):
    """Accumulated exact reflections H_t = I - 2 w_t w_t^T / |w_t|^2 -> the frame that `householder_encode` and `_decode` take.

    w (B, H, T, d), any scale; a zero w is the identity step. Products are in float64: after 65,536 steps C is then orthogonal to
    1e-13, against 1e-4 in float32; what a chunk adds is applied in float32 (float64 for float64 w). beta = 2 / |w|^2 belongs to the graph: with beta = 2 and w normalised outside
    it, gradients are wrong, since C^T = C^-1 holds on the sphere only. start (B, H, d, d): C_0, if not the identity.
    """
    wide, w = torch.promote_types(w.dtype, torch.float32), w.double()
    T, norm = w.size(2), w.square().sum(-1)
    W, X = ut_transform(*pad_steps(T, w, torch.where(norm > 0, 2 / torch.where(norm > 0, norm, 1), 0)))
    XW = X @ W                                                              # (B, H, N, c, d)
    frame = [torch.eye(w.size(-1), dtype=w.dtype, device=w.device).expand(*w.shape[:2], -1, -1) if start is None else start]
    for n in range(W.size(2)):                                              # C at the start of every chunk, and at the end
        frame.append(frame[-1] - W[:, :, n].mT @ (XW[:, :, n] @ frame[-1]))
    return W.to(wide), XW.to(wide), torch.stack(frame, dim=2)               # C (B, H, N + 1, d, d)


def householder_encode(x, frame):
    """x_t -> C_t^T x_t = C_t^-1 x_t: queries, keys and, where carried, values. x (B, H, T, d) -> the same, in x's dtype."""
    W, XW, C = frame
    y, = pad_steps(x.size(2), x.to(W.dtype))
    y = y.unflatten(2, W.shape[2:4])
    y = (y - (y @ W.mT).tril() @ XW) @ C[:, :, :-1].to(W.dtype)             # row form: to the chunk's start, then to 0
    return y.flatten(2, 3)[:, :, :x.size(2)].to(x.dtype)


def householder_decode(o, frame):
    """o_t -> C_t o_t, which takes the output of attention over encoded values back. o (B, H, T, d) -> the same, in o's dtype."""
    W, XW, C = frame
    y, = pad_steps(o.size(2), o.to(W.dtype))
    y = y.unflatten(2, W.shape[2:4]) @ C[:, :, :-1].mT.to(W.dtype)
    y = y - (y @ XW.mT).tril() @ W
    return y.flatten(2, 3)[:, :, :o.size(2)].to(o.dtype)


def path_attention(q, k, v, w, beta, log_forget=None, key_bias=None, cache=None, block=512):
    """PaTH attention (Yang et al., arXiv 2505.16381): logits q_i . H_i ... H_{j+1} k_j / sqrt(d), H_t = I - beta_t w_t w_t^T.

    q, k, v (B, H, T, d), w (B, H, T, d) unit vectors, beta (B, H, T) in (0, 2) -> (B, H, T, d); values are not carried.
    log_forget (B|1, H, T) <= 0: a forget gate (or -slope for ALiBi) adds sum_{s=j+1..i} log_forget_s to the logit after the
    1/sqrt(d) scale, as in FoX and as `attend` does; fla's PaTH kernel adds it before the scale. key_bias and cache as in `attend`.
    A single encode is impossible for beta != 2: H_t is not orthogonal, C_t grows singular (1e-15 after 256 random steps), and
    C_j^-1 k_j explodes. Hence blockwise: within a block of queries explicit logits from the UT transform; to all keys before
    it, which were carried to its start, one F.scaled_dot_product_attention, with one more key whose logit is the block's
    log-sum-exp and whose value marks an extra channel, so that its output merges both softmaxes.
    Transport in float32 (float64 for float64 input), autocast or not. Memory O(T d) without gradients.
    """
    B, H, T, d = q.shape
    if w.shape != q.shape or beta.shape != q.shape[:3]:
        raise ValueError(f"path_attention: w {tuple(w.shape)} and beta {tuple(beta.shape)} do not fit q {tuple(q.shape)}")
    one_more = holds_keys(cache, T)
    if log_forget is not None:
        key_bias = forget_bias(log_forget, cache)
    low, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    n_parts = 8 if wide == torch.float64 else 4
    with torch.autocast(q.device.type, enabled=False):
        if one_more:                                                        # one token: carry all cached keys by its step
            u = w.to(wide)
            cache["k"] = cache["k"] - (cache["k"] @ u.mT) * beta.to(wide)[..., None] @ u
            return attend(q.to(wide), k.to(wide), v.to(wide), key_bias=key_bias, cache=cache).to(low)
        q, k, v, w, beta = pad_steps(T, *(t.to(wide) for t in (q, k, v, w, beta)))
        bias = q.new_zeros(1, 1, T) if key_bias is None else key_bias.double()
        bias = torch.cat((bias, bias[..., -1:].expand(-1, -1, q.size(2) - T)), dim=-1)
        past_k, in_place, out = q.new_zeros(B, H, 1, d), not torch.is_grad_enabled(), []    # the null key first, then keys as they pass
        if in_place:                                                        # one buffer: growing copies would fragment memory
            room = q.new_zeros(B, H, 1 + q.size(2), d + 2 * n_parts)
        if q.size(2) > block:                                               # values, and that of the null key
            far_v = F.pad(v, (0, 2 * n_parts, 1, 0)) + F.pad(q.new_ones(1, 1), (d, 2 * n_parts - 1, 0, q.size(2)))
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        for start in range(0, q.size(2), block):
            Q, K, V, u, b = (t[:, :, start:start + block] for t in (q, k, v, w, beta))
            W, X = ut_transform(u, b)                                       # n chunks of c rows
            Qc, Kc = (t.unflatten(2, W.shape[2:4]) for t in (Q, K))
            QWX, WK = (Qc @ W.mT).tril() @ X, (W @ Kc.mT).tril(-1)
            own = (Qc @ Kc.mT - QWX @ WK).masked_fill(later, -math.inf)
            Qc = Qc - QWX @ W                                               # queries at the start of their chunk
            Kc = Kc - (X @ WK).mT @ W                                       # keys at its end
            A = torch.eye(d, dtype=wide, device=q.device) - W.mT @ X.mT @ W    # row form: a key goes through the chunk by k @ A
            rows, q0, keys, carry = [], [], Kc[:, :, 0, :0], torch.eye(d, dtype=wide, device=q.device)
            for n in range(W.size(2)):
                gap = q.new_full((B, H, CHUNK, Q.size(2) - (n + 1) * CHUNK), -math.inf)
                rows.append(torch.cat((Qc[:, :, n] @ keys.mT, own[:, :, n], gap), dim=-1))
                q0.append(Qc[:, :, n] @ carry.mT)                           # ... at the start of the block
                keys = torch.cat((keys @ A[:, :, n], Kc[:, :, n]), dim=2)
                carry = carry @ A[:, :, n]
            F_block, F_start = bias[..., start:start + block], bias[..., start:start + 1]
            logits = torch.cat(rows, dim=2) * d ** -0.5 + (F_block[..., None, :] - F_block[..., None]).to(wide)
            o, lse = logits.softmax(-1) @ V, logits.logsumexp(-1)
            if start:
                e, null = channels(lse + (F_block - F_start), d, n_parts)   # (B, H, S, parts)
                e, far = channels((bias[..., :start] - F_start).expand(B, H, -1), d, n_parts)
                far_q = torch.cat((torch.cat(q0, dim=2), null.to(wide), q.new_full((B, H, Q.size(2), n_parts), e)), dim=-1)
                extra = F.pad(far.to(wide), (n_parts, 0, 1, 0)) + F.pad(q.new_full((1, n_parts), e), (0, n_parts, 0, start))
                if in_place:
                    far_k = room[:, :, :1 + start]
                    far_k[..., d:] = extra
                else:
                    far_k = torch.cat((past_k, extra), dim=-1)              # (B, H, 1 + start, d + 2 n_parts)
                y = F.scaled_dot_product_attention(far_q.to(low), far_k.to(low), far_v[:, :, :1 + start].to(low), scale=d ** -0.5).to(wide)
                o = y[..., :d] + y[..., d:d + 1] * o
            if in_place:
                past_k.copy_(past_k @ carry)
                past_k = room[:, :, :1 + start + Q.size(2), :d]
                past_k[:, :, 1 + start:] = keys
            else:
                past_k = torch.cat((past_k @ carry, keys), dim=2)
            out.append(o)
        if cache is not None:
            cache["k"], cache["v"] = past_k[:, :, 1:T + 1], v[:, :, :T]
        return torch.cat(out, dim=2)[:, :, :T].to(low)


def forget_bias(log_forget, cache=None):
    """Forget gate (Lin et al., arXiv 2503.02130) as a key bias: log f (B, H, T) -> -cumsum(log f), float64; with a cache, of all keys."""
    if cache is not None:
        log_forget = extend(cache, "log_forget", log_forget, -1)
    return -log_forget.cumsum(-1, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Modules: whatever owns parameters or depends on tokens

class SharedTransport(nn.Module):
    """Phase and key bias that all layers share, from token ids: constant steps, angle tables, ALiBi.

    Random angles are a buffer that stays float32 under model.to(bfloat16), since its bits are kept as integers.
    """

    def __init__(self, pos, vocab_size, n_head, head_dim, sigma=0.3, rope_base=10000.0):
        super().__init__()
        rotation, self.bias = parse(pos)
        if head_dim % 2 and SCHEMES[rotation].step in ("constant", "random", "table", "hidden"):
            raise ValueError(f"{pos} turns channel pairs: the head dim must be even, got {head_dim}")
        self.step, self.n_head, self.head_dim, self.rope_base = SCHEMES[rotation].step, n_head, head_dim, rope_base
        if self.step in ("random", "table"):                                # N(0, sigma^2) per token id, head and block
            table = sigma * torch.randn(vocab_size, n_head * head_dim // 2, generator=torch.Generator().manual_seed(ANGLE_SEED))
            if self.step == "table":
                self.table = nn.Parameter(table)
            else:
                self.register_buffer("table_bits", table.view(torch.int32))

    def forward(self, idx, dtype=torch.float32, cache=None):
        """idx (B, T) token ids -> (cos_sin pair of (B|1, H|1, T, d/2) in dtype, or None), (key_bias (1, H, T) float64, or None).

        With a cache (a dict, empty at first) idx are the new tokens; the phase is theirs, the key bias that of all keys.
        """
        (B, T), turn, key_bias, first = idx.shape, None, None, 0
        if cache is not None:
            first = cache.get("length", 0)
            cache["length"] = first + T
        if self.step == "constant":
            steps = rope_steps(T, self.head_dim, self.rope_base, idx.device)[None]
            turn = cos_sin(running_phase(steps, dtype, cache)[:, None])
        elif self.step in ("random", "table"):
            table = self.table if self.step == "table" else self.table_bits.view(torch.float32)
            steps = F.embedding(idx, table)                                 # (B, T, H * d/2)
            turn = cos_sin(running_phase(steps, dtype, cache).view(B, T, self.n_head, -1).transpose(1, 2))
        if self.bias == "alibi":
            key_bias = (alibi_slopes(self.n_head, idx.device)[:, None] * torch.arange(first + T, device=idx.device))[None]
        return turn, key_bias


def running_phase(steps, dtype, cache):
    """accumulate() that goes on where the cache's last call ended. steps (B|1, T, n) -> (B|1, T, n)."""
    if cache is None:
        return accumulate(steps, dtype)
    phase = accumulate(torch.cat((cache["phase"], steps.double()), dim=1) if "phase" in cache else steps, torch.float64)[:, -steps.size(1):]
    cache["phase"] = phase[:, -1:]
    return phase.to(dtype)


def linear(layer, x):
    """A Linear layer in x's dtype, whatever the dtype of its parameters."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class LayerTransport(nn.Module):
    """One layer's attention under `pos`; owns the projections of schemes whose steps or gates come from the layer's input."""

    def __init__(self, pos, n_embd, n_head, sigma=0.3):
        super().__init__()
        rotation, bias = parse(pos)
        self.scheme, self.n_head, self.sigma, self.init_std = SCHEMES[rotation], n_head, sigma, {}
        if self.scheme.step == "hidden":
            self.steps = nn.Linear(n_embd, n_embd // 2, bias=False)         # (C) -> (H * d/2) angles
            self.init_std = {"steps": 1 / math.sqrt(n_embd)}                # inputs have unit RMS, so does the output: sigma scales it
        if self.scheme.step in ("reflection", "path"):                      # w as PaTH makes it: low rank, short convolution, SiLU
            self.w_down, self.w_up = nn.Linear(n_embd, W_RANK, bias=False), nn.Linear(W_RANK, n_embd, bias=False)
            self.w_conv = nn.Conv1d(n_embd, n_embd, W_CONV, groups=n_embd, bias=False)
        if self.scheme.step == "path":
            self.beta = nn.Linear(n_embd, n_head)
        self.gate = nn.Linear(n_embd, n_head) if bias == "fox" else None

    def w(self, x, cache):
        """x (B, T, C) -> reflection vectors (B, H, T, d), not normalised."""
        u = linear(self.w_up, linear(self.w_down, x)).mT                    # (B, C, T)
        u = torch.cat((cache["tail"], u), dim=-1) if cache and "tail" in cache else F.pad(u, (W_CONV - 1, 0))
        if cache is not None:
            cache["tail"] = u[..., 1 - W_CONV:]
        u = F.silu(F.conv1d(u, self.w_conv.weight.to(x.dtype), groups=u.size(1)))
        return u.unflatten(1, (self.n_head, -1)).mT

    def forward(self, q, k, v, x, shared, cache=None):
        """q, k, v (B, H, T, d), x (B, T, C) the layer's normalised input, shared from SharedTransport -> (B, H, T, d)."""
        (turn, key_bias), step, values = shared, self.scheme.step, self.scheme.values
        if step not in ("hidden", "reflection", "path") and self.gate is None:
            return attend(q, k, v, turn, values, key_bias, cache)
        with torch.autocast(x.device.type, enabled=False):                  # steps and gates are never bfloat16
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if self.gate is not None:
                key_bias = forget_bias(F.logsigmoid(linear(self.gate, x)).mT, cache)
                q, k, v = q.to(x.dtype), k.to(x.dtype), v.to(x.dtype)       # bfloat16 attention costs the gate 5-13 % gradient error
            if step == "hidden":
                phase = running_phase(self.sigma * linear(self.steps, x), x.dtype, cache)   # (B, T, H * d/2)
                turn = cos_sin(phase.unflatten(-1, (self.n_head, -1)).transpose(1, 2))
            if step == "path":
                w = self.w(x, cache)
                w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
                return path_attention(q, k, v, w, 2 * torch.sigmoid(linear(self.beta, x)).mT, key_bias=key_bias, cache=cache)
            if step == "reflection":
                frame = householder(self.w(x, cache), cache.get("frame") if cache else None)
                if cache is not None:
                    cache["frame"] = frame[-1][:, :, -1]
                q, k, v = householder_encode(q, frame), householder_encode(k, frame), householder_encode(v, frame) if values else v
                o = attend(q, k, v, key_bias=key_bias, cache=cache)
                return householder_decode(o, frame) if values else o
            return attend(q, k, v, turn, values, key_bias, cache)
