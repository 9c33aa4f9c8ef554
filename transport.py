"""Positions as transport: the schemes of "Why Do Accumulated Transformations Extrapolate?", arXiv 2606.24975.

    o_i = sum_j softmax_j( q_i . P_ji k_j / sqrt(d) + b_j - b_i )  P_ji v_j,    P_ji = M_i M_{i-1} ... M_{j+1}

Every token t contributes an orthogonal step M_t. A key, and where the scheme says so a value, is carried by
P_ji along the path of tokens from its place j to the query's place i. Products telescope: P_ji = C_i C_j^-1
with C_t = M_t C_{t-1}. So attention is

    encode q, k (and v) by C_t^-1   ->   one causal softmax attention   ->   decode the output by C_i.

b is a distance bias: any function of the key's place minus the same function of the query's. (Biases that are
not such a difference, like T5's, do not fit.) This file needs torch alone: copy it, or parts (see README.md).
Read first `accumulate`, `Rotation`, `attend`, and then, from the end, SCHEMES and the modules it names.

Conventions (tested in test_all.py)
  path    from key j to query i is (j, i]: the key's own step is left out, the query's is in; P_{i->i} = I.
  pairs   are half-split: channel c turns together with channel c + d/2 (Llama and GPT-NeoX checkpoints).
  sign    is RoPE's: q, k and v turn by +phase, the output by -phase. RoPE is the case of a constant step,
          ALiBi that of a constant forget gate, no positions (NoPE) that of a zero step.
  shapes  q (B, H, T, d); k, v the same, or of more positions (queries are then the last ones), or of fewer
          heads (each serves H / H_kv heads of q in a row); key biases (B|1, H|1, T_k).
  norms   of q and k, if any, come before transport: a learnable gain after it would break the path law.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

SEGMENT = 768       # queries that biased attention and PaTH take at a time; CPU kernels like 768 or more
CHUNK = 64          # steps in a chunk of the UT transform
NEVER = -2.0 ** 15  # a logit this far below the best of its row has no weight
TINY = 1e-30        # PaTH's keys fade; numbers below this would make some CPUs ten times slower


# -----------------------------------------------------------------------------------------------------------
# First reading: rotations that accumulate, biases, attention

def accumulate(steps, start=None, dtype=torch.float32):
    """Phase of every position: the running sum of step angles, wrapped to (-pi, pi].

    steps (..., T, d/2) radians; start (..., 1, d/2): the phase before the first step, if it is not zero.
    -> (..., T, d/2) in `dtype`. Sum and wrap are in float64: at T = 65,536 a float32 sum is off by 1e-2, and
    steps in bfloat16 are useless whatever the sum.
    """
    phase = steps.cumsum(-2, dtype=torch.float64)
    if start is not None:
        phase = phase + start
    turns = torch.ceil(phase.detach() * (0.5 / math.pi) - 0.5)
    return phase.sub(turns, alpha=2 * math.pi).to(dtype)


class Rotation:
    """A transport that turns channel pairs (c, c + d/2) by a phase (B|1, H|1, T, d/2), in radians:
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). `Turn` does it, further down."""

    def __init__(self, phase):
        self.phase = phase
        self.cos, self.sin = phase.detach().cos(), phase.detach().sin()

    def encode(self, x):
        """x_t -> C_t^-1 x_t, (B, H, T, d) in x's dtype. Raises ValueError on shapes that do not fit."""
        return Turn.apply(x, self.phase, self.cos, self.sin, 1)

    def decode(self, o):
        """o_t -> C_t o_t."""
        return Turn.apply(o, self.phase, self.cos, self.sin, -1)


def rotate(x, phase):
    """RoPE on q or k, where phase = accumulate(rope_steps(T, d))[None, None]: x (B, H, T, d) -> the same."""
    return Rotation(phase).encode(x)


def rope_steps(T, d, base=10000.0, device=None):
    """RoPE as steps: base^(-2c/d) at every position (Su et al., arXiv 2104.09864). -> (T, d/2) float64.

    accumulate(steps, -steps[:1]) is 0 at the first position, as in caches of rotated keys.
    """
    if d % 2:
        raise ValueError(f"rope_steps: the head dim must be even, got {d}")
    angles = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    return angles.expand(T, d // 2)


def alibi_slopes(n_head, device=None):
    """ALiBi's published slopes (Press et al., arXiv 2108.12409), (n_head,) float64. Key bias: slope * place.

    2^(-8h/n) for a power of two n; else those of the power of two below, then every second one of that above.
    """
    n = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    slopes += [2 ** (-4 * h / n) for h in range(1, 2 * (n_head - n), 2)]
    return torch.tensor(slopes, dtype=torch.float64, device=device)


def forget_bias(log_forget):
    """Forget gates as a key bias (Lin et al., arXiv 2503.02130): log f, (B, H, T) -> (B, H, T) float64."""
    return -log_forget.cumsum(-1, dtype=torch.float64)


def attend(q, k, v, transport=None, value_transport=None, key_bias=None, past=None):
    """Causal attention with carried keys and values, in place of F.scaled_dot_product_attention.

    q (B, H, T, d); k, v (B, H_kv, T_k, d). With T < T_k the queries are the last positions; a head of k and v
    serves H / H_kv heads of q. transport carries keys, value_transport values (the same object, another one,
    or none), each for the T_k positions and H_kv heads of k. key_bias (B|1, H|1, T_k) is added to the logits
    after the 1/sqrt(d) scale: slope * place for ALiBi, `forget_bias`, or -inf or -1e9 to hide padded keys.
    past: a dict, empty at first, that keeps encoded keys and values; k, v and transports are then those of
    the new positions, key_bias that of all.
    -> (B, H, T, d) in q's dtype; differentiable, float64 to bfloat16, memory linear in T_k, but for a mask of
    T x T_k where 1 < T < T_k.
    Raises ValueError on shapes that do not fit, before `past` is touched.
    """
    check_shapes(q, k, v, key_bias, past)
    if hasattr(transport, "attend"):                         # PaTH has no encode: see the second reading
        return transport.attend(q, k, v, value_transport, key_bias, past)

    keys, values = k, v
    if transport is not None:
        q = for_queries(transport.encode, q, k)
        keys = transport.encode(k)
    if value_transport is not None:
        values = value_transport.encode(v)
    if past is not None:
        keys = append(past, "k", keys, 2)
        values = append(past, "v", values, 2)

    if key_bias is None:
        o = softmax_attention(q, keys, values)
    else:
        o = biased_attention(q, keys, values, key_bias)

    if value_transport is not None:
        o = for_queries(value_transport.decode, o, k)
    return o


def softmax_attention(q, k, v, mask=None, causal=True, scale=None):
    """The one call of F.scaled_dot_product_attention; with fewer queries than keys, they are the last ones.

    mask (..., T, T_k) is added to the logits; causality is then its business.
    """
    T, T_k, is_causal = q.size(2), k.size(2), False
    if causal and mask is None:
        if T == T_k:
            is_causal = True                                 # a bool: torch.compile has no other
        elif T > 1:                                          # is_causal would align the first positions
            mask = torch.ones(T, T_k, dtype=torch.bool, device=q.device).tril(T_k - T)
    grouped = k.size(1) != q.size(1)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


# -----------------------------------------------------------------------------------------------------------
# What the first reading stands on: turning, checking, a past, grouped heads

class Turn(torch.autograd.Function):
    """Turn x by sign * phase; cos and sin are those of the phase. No second derivatives.

    Backward turns the gradient back, and has one product for the phase. It keeps the output, as SDPA does;
    autograd's own formulas keep float32 copies of x and differentiate every product.
    """

    generate_vmap_rule = True                                # for torch.func

    @staticmethod
    def forward(x, phase, cos, sin, sign):
        return turn(x, cos, sin, sign)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, phase, cos, sin, ctx.sign = inputs
        ctx.save_for_backward(output, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        out, cos, sin = ctx.saved_tensors
        to_phase = None
        if ctx.needs_input_grad[1]:                          # d out / d phase is out, a quarter turn further
            wide = torch.promote_types(out.dtype, cos.dtype)
            grad1, grad2 = grad.to(wide).chunk(2, dim=-1)
            out1, out2 = out.to(wide).chunk(2, dim=-1)
            to_phase = torch.addcmul(grad2 * out1, grad1, out2, value=-1).sum_to_size(cos.shape)
            to_phase = (ctx.sign * to_phase).to(cos.dtype)
        return turn(grad, cos, sin, -ctx.sign), to_phase, None, None, None


def turn(x, cos, sin, sign):
    """Turn the pairs of x (B, H, T, d) by sign * angles of these cosines and sines, in the wider dtype."""
    B, H, T, d = x.shape
    batch_fits = cos.dim() == 4 and cos.size(0) in (1, B) and cos.size(1) in (1, H)
    if not batch_fits or cos.shape[2:] != (T, d // 2) or d % 2:
        wanted = f"({B}|1, {H}|1, {T}, {d}/2)"
        raise ValueError(f"x {tuple(x.shape)} needs a phase {wanted}, not {tuple(cos.shape)}")

    x1, x2 = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    y1 = torch.addcmul(x1 * cos, x2, sin, value=-sign)
    y2 = torch.addcmul(x2 * cos, x1, sin, value=sign)
    return torch.cat((y1.to(x.dtype), y2.to(x.dtype)), dim=-1)


def check_shapes(q, k, v, key_bias, past):
    """Raise ValueError unless the arguments of `attend` fit together."""
    whole = q.dim() == k.dim() == 4 and k.shape == v.shape and 1 <= q.size(2) <= k.size(2)
    if not whole or q.size(0) != k.size(0) or q.size(3) != k.size(3) or q.size(1) % k.size(1):
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError("attend needs q (B, H, T, d) and k, v (B, H_kv, T_k, d), T from 1 to T_k, "
                         f"H a multiple of H_kv, not {shapes}")

    T_k = held(past) + k.size(2)
    if held(past) and (past["k"].shape[:2], past["k"].size(3)) != (k.shape[:2], k.size(3)):
        raise ValueError(f"keys {tuple(k.shape)} do not go on with the past's {tuple(past['k'].shape)}")
    if key_bias is not None:
        B, H = q.shape[:2]
        fits = key_bias.dim() == 3 and key_bias.size(0) in (1, B) and key_bias.size(1) in (1, H)
        if not fits or key_bias.size(2) != T_k or not key_bias.is_floating_point():
            raise ValueError(f"key_bias must be floats ({B}|1, {H}|1, {T_k}), not {key_bias.dtype} "
                             f"{tuple(key_bias.shape)}; a mask of 0 and 1 is mask.float().log()")


def held(past):
    """The number of positions whose keys a past holds."""
    return past["k"].size(2) if past and "k" in past else 0


def append(past, name, new, dim):
    """Join what past[name] holds and `new` along dim; keep the whole there, and return it."""
    past[name] = torch.cat((past[name], new), dim) if name in past else new
    return past[name]


def for_queries(carry, x, k):
    """Apply carry, the encode or decode for k's positions and heads, to x, which may have only the last
    positions, and groups of heads."""
    missing, groups = k.size(2) - x.size(2), x.size(1) // k.size(1)
    if missing == 0 and groups == 1:
        return carry(x)
    x = F.pad(x, (0, 0, missing, 0)).unflatten(1, (k.size(1), groups))
    x = torch.stack([carry(head) for head in x.unbind(2)], dim=2)
    return x.flatten(1, 2)[:, :, missing:]


# -----------------------------------------------------------------------------------------------------------
# Attention with a key bias, precise in every row. Softmax is blind to a constant per row, so b_j alone would
# be enough; but far along it is large, and float32 would lose the logits in it. Every row has its own zero
# instead, the largest bias that it sees: what has weight is close to it, and no later token has a say in it.

def biased_attention(q, k, v, key_bias):
    """softmax_j(q_i . k_j / sqrt(d) + key_bias_j) v_j over j <= i; shapes as in `attend`."""
    dtype, kernel = q.dtype, kernel_dtype(q, key_bias)
    q = q.to(kernel) * q.size(-1) ** -0.5                    # from here on a logit is q_i . k_j + bias_j
    k, v = k.to(kernel), v.to(kernel)
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)

    short = q.size(2) * k.size(2) <= SEGMENT ** 2
    by_kind = masked_attention if short else segmented_attention
    return by_kind(q, k, v, *bias_and_zero(key_bias)).to(dtype)


def kernel_dtype(q, key_bias):
    """float32 on CPU, where some bfloat16 kernels round logits, and for a bias that is learned, since
    bfloat16 gradients cost a gate 5 to 13 %; else q's dtype."""
    learned = key_bias is not None and key_bias.requires_grad
    return torch.promote_types(q.dtype, torch.float32) if learned or q.device.type == "cpu" else q.dtype


def bias_and_zero(key_bias):
    """-> the bias in float64, and the largest one that each row sees, both (B|1, H|1, T)."""
    bias = key_bias.double().clamp_min(-1e30)                # -inf - -inf would be no number
    return bias, bias.detach().cummax(-1).values


def bias_mask(bias, zero, rows, keys, dtype):
    """Bias of every pair, for slices of positions: (B|1, H|1, rows, keys), -inf ahead of the row."""
    mask = (bias[..., None, keys] - zero[..., rows, None]).to(dtype)
    ahead = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).triu(1 + rows.start - keys.start)
    return mask.masked_fill_(ahead, -math.inf)


def masked_attention(q, k, v, bias, zero):
    """Short texts: the bias of every pair is a mask; its gradient takes a channel, so kernels stay fused."""
    d, T = q.size(-1), k.size(2)
    mask = bias_mask(bias.detach(), zero, slice(T - q.size(2), T), slice(0, T), q.dtype)
    if bias.requires_grad:
        nothing = bias - bias.detach()                       # adds zero to a logit, but takes its gradient
        # of 8 channels seven are zero: fused kernels want a multiple of 8
        channels = F.pad(nothing[..., None], (0, 7)).to(k.dtype).expand(*k.shape[:3], 8)
        q = F.pad(q, (0, 8), value=1.0)
        k = torch.cat((k, channels), dim=-1)
        v = F.pad(v, (0, 8))
    with torch.autocast(q.device.type, enabled=False):
        return softmax_attention(q, k, v, mask, scale=1.0)[..., :d]


@torch.compiler.disable                                      # it would unroll the loop, anew for every length
def segmented_attention(q, k, v, bias, zero):
    """Long texts, by segments: logits of the segment's own keys are explicit, earlier keys go to SDPA."""
    wide = torch.promote_types(q.dtype, torch.float32)
    T, out = k.size(2), []
    first = T - q.size(2)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(first, T, SEGMENT):
            near = slice(start, min(start + SEGMENT, T))
            rows = q[:, :, near.start - first:near.stop - first]
            logits = rows.to(wide) @ k[:, :, near].to(wide).mT + bias_mask(bias, zero, near, near, wide)
            far_k, far_v = k[:, :, :start], v[:, :, :start]
            out.append(near_and_far(logits, v[:, :, near], rows, far_k, far_v, bias, zero))
    return torch.cat(out, dim=2)


def near_and_far(logits, near_v, q, far_k, far_v, bias, zero):
    """One softmax over the keys of a segment, with known logits (B, H, S, S), and all keys before it.

    q, near_v (B, H, S, d); far_k, far_v (B, H, start, d); bias, zero (B|1, H|1, T) -> (B, H, S, d). SDPA
    does not tell its normaliser, so the near keys take part in its call as one more key: its logit is their
    log-sum-exp, its value marks an extra channel, and what arrives there is the weight of the near part. It
    stands last: met first, it would turn the weights of far keys into slow numbers like 1e-40.
    """
    B, H, S, d = q.shape
    start, wide = far_k.size(2), logits.dtype
    weights = logits.softmax(-1)
    near = weights @ near_v.to(wide)
    if start == 0:
        return near.to(q.dtype)

    far_zero = zero[..., start - 1, None]
    lse = logits.amax(-1) - weights.amax(-1).log()           # cheaper than logsumexp, and as exact
    near_logit = (lse + (zero[..., start:start + S] - far_zero)).clamp(NEVER, -NEVER)
    far_bias = (bias[..., :start] - far_zero).clamp_min(NEVER)
    n = 8 if wide == torch.float64 else 4
    near_digits, far_digits = digits(near_logit, n), digits(far_bias, n)

    # channels: the head dim, n for the logit of the near keys, n for the bias of the far ones
    queries = F.pad(torch.cat((q, near_digits.to(q.dtype)), dim=-1), (0, n), value=1.0)
    keys = q.new_zeros(B, H, start + 1, d + 2 * n)
    keys[:, :, :start, :d] = far_k
    keys[:, :, :start, d + n:] = far_digits
    keys[:, :, start, d:d + n] = 1
    values = torch.zeros_like(keys)
    values[:, :, :start, :d] = far_v
    values[:, :, start, d] = 1

    y = softmax_attention(queries, keys, values, causal=False, scale=1.0).to(wide)
    return (y[..., :d] + y[..., d:d + 1] * near).to(q.dtype)


def digits(logit, n):
    """Write a logit as the sum of n channels: (...) float64 -> (..., n).

    They are digits in base 256, which bfloat16 holds exactly, so no cast can hurt; four are right to 2^-32.
    round() takes them, on a grid for each element: `.to(bfloat16)` would be dropped by torch.compile and
    leave errors up to 1e3. The gradient goes through the first one.
    """
    rest, parts = logit.detach(), []
    grid = torch.exp2(torch.ceil(torch.log2(rest.abs().clamp_min(1e-30) / 256)))
    for _ in range(n):
        parts.append((rest / grid).round() * grid)
        rest, grid = rest - parts[-1], grid / 256
    parts[0] = logit + (parts[0] - logit.detach())
    return torch.stack(parts, dim=-1)


# -----------------------------------------------------------------------------------------------------------
# Second reading: steps that do not commute, H_t = I - beta_t w_t w_t^T. Many are multiplied chunk by chunk.

def ut_transform(w, beta):
    """Products within chunks of steps: H_i ... H_1 = I - W[:i]^T X[:i, :i] W[:i] for every i of a chunk.

    w (B, H, T, d), beta (B, H, T) -> W (B, H, N, c, d), X (B, H, N, c, c) lower triangular; the last chunk is
    filled up with identity steps (w = 0). The solve is in float64: where steps are nearly the same, some CPUs
    lose three digits in float32. (Compact WY form: Bischof & Van Loan 1987; Yang et al., arXiv 2406.06484.)
    """
    W, b = in_chunks(w), in_chunks(beta)
    L, b = (b[..., None] * W @ W.mT).tril(-1).double(), b.double()
    X = torch.linalg.solve_triangular(L, b.diag_embed(), upper=False, unitriangular=True)
    return W, X.to(W.dtype)


def in_chunks(x):
    """(B, H, T, ...) -> (B, H, N, c, ...), c = CHUNK or less, zeros at the end."""
    size = min(CHUNK, x.size(2))
    missing = -x.size(2) % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    return x.contiguous().unflatten(2, (-1, size))           # matmul would copy others every time


class Reflections:
    """The transport of accumulated exact reflections H_t = I - 2 w_t w_t^T / |w_t|^2.

    w (B, H, T, d), any scale; a zero w is the identity step. start (B, H, d, d): product of earlier steps.
    Products are in float64: after 65,536 steps C is orthogonal to 1e-13, not 1e-4. Up to SEGMENT learned
    steps are multiplied in float32: right to 5e-5, and faster. The factor 2 / |w|^2 stays in the graph: with
    a constant in its place gradients are wrong, since C^T = C^-1 holds on the sphere only. Left out of
    compiled graphs, like PaTH, which gets NaN there, and costs the compiler a minute a layer (see
    results/speed.py).
    """

    @torch.compiler.disable
    def __init__(self, w, start=None):
        dtype = torch.promote_types(w.dtype, torch.float32)
        B, H, T, d = w.shape
        quick = w.requires_grad and start is None and T <= SEGMENT
        w = w.to(dtype if quick else torch.float64)
        size = w.detach().abs().amax(-1, keepdim=True)
        w = w / torch.where(size > 0, size, 1)               # the same step, but no square underflows
        beta = 2 / w.square().sum(-1).clamp_min(1)           # |w|^2 is 1 or more, or w is zero: no step
        W, X = ut_transform(w, beta)
        XW = X @ W                                           # (B, H, N, c, d)
        eye = torch.eye(d, dtype=w.dtype, device=w.device)

        C = eye.expand(B, H, d, d) if start is None else start.to(w.dtype)
        products = [C]                                       # C at the start of every chunk, and at the end
        for chunk in (eye - W.mT @ XW).unbind(2):
            products.append(chunk @ products[-1])
        self.end = products.pop()
        self.W, self.XW = W.to(dtype), XW.to(dtype)
        self.C = torch.stack(products, dim=2).to(dtype)      # (B, H, N, d, d)

    @torch.compiler.disable
    def encode(self, x):
        """x_t -> C_t^-1 x_t = C_t^T x_t, (B, H, T, d): to the chunk's start, then to the beginning."""
        with torch.autocast(x.device.type, enabled=False):
            y = self.chunks_of(x)
            y = (y - (y @ self.W.mT).tril() @ self.XW) @ self.C
        return y.flatten(2, 3)[:, :, :x.size(2)].to(x.dtype)

    @torch.compiler.disable
    def decode(self, o):
        """o_t -> C_t o_t."""
        with torch.autocast(o.device.type, enabled=False):
            y = self.chunks_of(o) @ self.C.mT
            y = y - (y @ self.XW.mT).tril() @ self.W
        return y.flatten(2, 3)[:, :, :o.size(2)].to(o.dtype)

    def chunks_of(self, x):
        y = in_chunks(x.to(self.W.dtype))
        if y.shape != self.W.shape:
            raise ValueError(f"reflections {tuple(self.W.flatten(2, 3).shape)} do not fit {tuple(x.shape)}")
        return y


class Path(NamedTuple):
    """PaTH's steps I - beta w w^T (Yang et al., arXiv 2505.16381), in the place of a transport.

    w (B, H, T, d) unit vectors, beta (B, H, T) in (0, 2). They are not orthogonal: C_t grows singular, 1e-15
    after 256 random steps, so C_j^-1 k_j cannot be had, and there is no encode.
    """
    w: torch.Tensor
    beta: torch.Tensor

    def attend(self, q, k, v, value_transport, key_bias, past):
        if value_transport is not None:
            raise ValueError(f"PaTH carries keys alone, not the values {tuple(v.shape)}")
        return path_attention(q, k, v, self.w, self.beta, key_bias, past)


@torch.compiler.disable                                      # see Reflections
def path_attention(q, k, v, w, beta, key_bias=None, past=None):
    """PaTH attention: logits q_i . H_i ... H_{j+1} k_j / sqrt(d) + key_bias_j, H_t = I - beta_t w_t w_t^T.

    q, k, v (B, H, T, d), w (B, H, T, d) unit vectors, beta (B, H, T) in (0, 2) -> (B, H, T, d); values stay.
    key_bias and past as in `attend`. By segments: its own keys have explicit logits; earlier ones have been
    carried to its start, where one SDPA meets the queries, carried back. Products are in float32, in float64
    for float64 input, whatever autocast says, that SDPA in kernel_dtype. PathSteps lists what fla does
    otherwise.
    """
    check_shapes(q, k, v, key_bias, past)
    if not q.shape == k.shape == w.shape or q.shape[:3] != beta.shape:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(w.shape)}, {tuple(beta.shape)}"
        raise ValueError(f"PaTH needs q, k, w (B, H, T, d) and beta (B, H, T), not {shapes}")
    dtype, kernel = q.dtype, kernel_dtype(q, key_bias)
    wide = torch.promote_types(dtype, torch.float32)
    old, out = held(past), []

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, w, beta = q.to(wide) * q.size(-1) ** -0.5, k.to(wide), v.to(wide), w.to(wide), beta.to(wide)
        bias, zero = bias_and_zero(q.new_zeros(1, 1, old + q.size(2)) if key_bias is None else key_bias)
        keys = past["k"] if old else k[:, :, :0]             # those before the segment, carried to its start
        if past is not None:
            v = append(past, "v", v, 2)

        for now, logits, q_start, far_k, keys in path_segments(q, k, w, beta, keys):
            near = slice(old + now.start, old + now.stop)    # of all tokens
            logits = logits + bias_mask(bias, zero, near, near, wide)
            far_v = v[:, :, :near.start]
            out.append(near_and_far(logits, v[:, :, near], q_start.to(kernel), far_k, far_v, bias, zero))

        if past is not None:
            past["k"] = keys
        return torch.cat(out, dim=2).to(dtype)


def path_segments(q, k, w, beta, keys):
    """Walk over segments, after keys (B, H, old, d) of earlier calls. -> for each its slice of tokens, its
    logits and q_start (see path_segment), all keys before it, at its start, and all keys at its end."""
    for start in range(0, q.size(2), SEGMENT):
        now = slice(start, min(start + SEGMENT, q.size(2)))
        steps = w[:, :, now], beta[:, :, now]
        logits, q_start, k_end, product = path_segment(q[:, :, now], k[:, :, now], *steps)
        far_k, keys = keys, torch.cat((F.hardshrink(keys @ product, TINY), k_end), dim=2)
        yield now, logits, q_start, far_k, keys


def path_segment(q, k, w, beta):
    """The steps within a segment, from chunk to chunk. q, k, w (B, H, S, d), beta (B, H, S) ->

    logits  (B, H, S, S)   q_i . H_i ... H_{j+1} k_j for j <= i, zero ahead
    q_start (B, H, S, d)   queries carried back to the segment's start: times a key there, they give its logit
    k_end   (B, H, S, d)   keys carried on to the segment's end
    product (B, H, d, d)   carries keys, as rows, from the segment's start to its end
    """
    S = q.size(2)
    W, X = ut_transform(w, beta)
    q, k = in_chunks(q), in_chunks(k)                        # (B, H, N, c, d)
    N, c = q.shape[2:4]

    # inside a chunk: logits, queries at its start, keys at its end, and its product A = H_1 ... H_c for rows
    QW, XW = (q @ W.mT).tril(), X @ W
    XWK = X @ (W @ k.mT).tril(-1)
    own = (q @ k.mT).tril() - QW @ XWK
    q = q - QW @ XW
    k = k - XWK.mT @ W
    eye = torch.eye(q.size(-1), dtype=q.dtype, device=q.device)
    A = eye - XW.mT @ W

    # from chunk to chunk: keys so far are carried on, queries back
    keys, product, rows, q_start = k[:, :, 0, :0], eye, [], []
    for n in range(N):
        row = torch.cat((q[:, :, n] @ keys.mT, own[:, :, n]), dim=-1)
        rows.append(F.pad(row, (0, (N - 1 - n) * c)))
        q_start.append(q[:, :, n] @ product.mT)
        keys = torch.cat((keys @ A[:, :, n], k[:, :, n]), dim=2)
        product = product @ A[:, :, n]

    logits = torch.cat(rows, dim=2)[:, :, :S, :S]
    return logits, torch.cat(q_start, dim=2)[:, :, :S], keys[:, :, :S], product


# -----------------------------------------------------------------------------------------------------------
# The schemes: modules that turn token ids and a layer's input into a transport, a key bias, or a scale of the
# logits. A new scheme is one such class and one row of SCHEMES.
#
# forward(idx, x, past): idx (B, T) token ids; x (B, T, C) the layer's normalised input, or the token
# embeddings for a `shared` module, which all layers have in common; float32 or wider. past: a dict in which
# to keep what the next call goes on from. The config has n_head, n_embd, vocab_size, sigma, rope_base,
# alibi_scale and train_context.

class Angles(nn.Module):
    """Steps that turn channel pairs: a subclass gives the angles by `steps`, (B|1, T, H|1, d/2), radians."""
    shared = True

    def __init__(self, config):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.n_embd // config.n_head
        if self.head_dim % 2:
            raise ValueError(f"channels turn in pairs: the head dim must be even, got {self.head_dim}")

    def forward(self, idx, x, past):
        steps = self.steps(idx, x, past).transpose(1, 2)
        phase = accumulate(steps, past.get("phase"), torch.float64)
        past["phase"] = phase[:, :, -1:].clone()
        return Rotation(phase.to(x.dtype))


class ConstantAngles(Angles):
    def __init__(self, config):
        super().__init__(config)
        self.base = config.rope_base

    def steps(self, idx, x, past):
        steps = rope_steps(idx.size(1), self.head_dim, self.base, idx.device)[None, :, None]
        past.setdefault("phase", -steps[:, :1])             # the first token stands at 0
        return steps


def random_angles(config, which):
    """Table number `which` of N(0, sigma^2) per token id, head and pair, (vocab_size, H * d/2). It depends on
    torch.manual_seed alone: every rank and every scheme draws the same."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    shape = which + 1, config.vocab_size, config.n_embd // 2
    return config.sigma * torch.randn(shape, generator=generator, dtype=torch.float32)[which]


class RandomAngles(Angles):
    which = 0

    def __init__(self, config):
        super().__init__(config)
        # as integers, since model.to(bfloat16) rounds buffers of floats
        self.register_buffer("bits", random_angles(config, self.which).view(torch.int32))

    def steps(self, idx, x, past):
        return F.embedding(idx, self.bits.view(torch.float32)).unflatten(-1, (self.n_head, -1))


class LearnedAngles(Angles):
    which = 0

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(random_angles(config, self.which))

    def steps(self, idx, x, past):
        return F.embedding(idx, self.table).unflatten(-1, (self.n_head, -1))


class FreshAngles(RandomAngles):
    """The row of the table is the sum of all ids so far, modulo its size: steps look drawn afresh at every
    position, whatever its token is, and are the same again for the same text."""

    def steps(self, idx, x, past):
        rows = past.get("row", 0) + idx.cumsum(-1)
        past["row"] = rows[:, -1:].clone()
        return super().steps(rows % self.bits.size(0), x, past)


class RandomValueAngles(RandomAngles):
    which = 1


class LearnedValueAngles(LearnedAngles):
    which = 1


class HiddenAngles(Angles):
    shared = False

    def __init__(self, config):
        super().__init__(config)
        self.sigma, self.angle = config.sigma, nn.Linear(config.n_embd, config.n_embd // 2, bias=False)

    def init_weights(self):
        nn.init.normal_(self.angle.weight, std=1 / math.sqrt(self.angle.in_features))   # for unit RMS

    def steps(self, idx, x, past):
        return (self.sigma * linear(self.angle, x)).unflatten(-1, (self.n_head, -1))


class HiddenVectors(nn.Module):
    """Vectors w as PaTH makes them from a layer's input: low rank, short causal convolution, SiLU."""
    RANK, TAPS = 32, 3

    def __init__(self, config):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.down = nn.Linear(C, self.RANK, bias=False)
        self.up = nn.Linear(self.RANK, C, bias=False)
        self.conv = nn.Conv1d(C, C, self.TAPS, groups=C, bias=False)

    def forward(self, x, past):
        """(B, T, C) -> (B, H, T, d), not normalised."""
        u = linear(self.up, linear(self.down, x)).mT        # (B, C, T)
        tail = past.get("tail", u.new_zeros(u.size(0), u.size(1), self.TAPS - 1))
        u = torch.cat((tail, u), dim=-1)
        past["tail"] = u[..., 1 - self.TAPS:]

        u = F.silu(F.conv1d(u, self.conv.weight.to(x.dtype), groups=u.size(1)))
        return u.unflatten(1, (self.n_head, -1)).mT


class HiddenReflections(nn.Module):
    shared = False

    def __init__(self, config):
        super().__init__()
        self.w = HiddenVectors(config)

    def forward(self, idx, x, past):
        reflections = Reflections(self.w(x, past), past.get("product"))
        past["product"] = reflections.end
        return reflections


class PathSteps(nn.Module):
    """w and beta of PaTH from the layer's input. What fla (fla/layers/path_attn.py) does otherwise:

    init   its convolution starts as N(0, 0.02^2), not as U(-0.58, 0.58), torch's default; its Linear layers
           as N(0, 0.02^2) at any width, not at 768 alone
    heads  k, v, w and beta may have fewer heads than q; w is then of full rank
    gate   log f is added before the 1/sqrt(d) scale, not after it as in FoX and here
    dtype  w is float16 in the kernel and beta the model's, not float32
    """
    shared = False

    def __init__(self, config):
        super().__init__()
        self.w, self.beta = HiddenVectors(config), nn.Linear(config.n_embd, config.n_head)

    def forward(self, idx, x, past):
        w = self.w(x, past)
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
        return Path(w, 2 * torch.sigmoid(linear(self.beta, x)).mT)


class Alibi(nn.Module):
    shared = True

    def __init__(self, config):
        super().__init__()
        self.n_head, self.scale = config.n_head, config.alibi_scale

    def forward(self, idx, x, past):
        slopes = self.scale * alibi_slopes(self.n_head, idx.device)
        return slopes[None, :, None] * places(idx, past)


class ForgetGate(nn.Module):
    shared = False

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_head)

    def forward(self, idx, x, past):
        log_forget = F.logsigmoid(linear(self.gate, x)).mT  # (B, H, T)
        return forget_bias(append(past, "log_forget", log_forget, -1))


class LogLength(nn.Module):
    """Logits times max(1, ln i / ln L) for the i-th query, L the training context: i keys compete for the
    attention that L had in training. It does nothing in training. (Su 2021; Chiang & Cholak 2022.)"""
    shared = True

    def __init__(self, config):
        super().__init__()
        self.train_context = config.train_context

    def forward(self, idx, x, past):
        return (log_keys(idx, x, past) / math.log(self.train_context)).clamp_min(1)[None, None]


class ScalableSoftmax(nn.Module):
    """Logits times s ln i for the i-th query, s learned per head (Nakanishi, arXiv 2501.19399)."""
    shared = False

    def __init__(self, config):
        super().__init__()
        self.s = nn.Parameter(torch.full((config.n_head,), 1 / math.log(config.train_context)))

    def forward(self, idx, x, past):
        return (self.s.to(x.dtype)[:, None] * log_keys(idx, x, past))[None]


def log_keys(idx, x, past):
    """ln i for every query in idx, the i-th of all, which sees i keys: (T,) in x's dtype."""
    return (1 + places(idx, past)[-idx.size(1):]).to(x.dtype).log()


def places(idx, past):
    """The places 0, 1, 2, ... of all tokens so far, those of earlier calls included."""
    past["length"] = past.get("length", 0) + idx.size(1)
    return torch.arange(past["length"], device=idx.device)


def linear(layer, x):
    """A Linear layer in x's dtype, whatever the dtype of its parameters."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class Scheme(NamedTuple):
    kind: str               # of KINDS
    module: type | None     # of the classes above; None: the identity step
    values: bool | type     # are values carried too? A class: by a transport of their own
    about: str


KINDS = ["rotation", "bias", "scale"]
SCHEMES = {
    "nope": Scheme("rotation", None, False, "identity step: no positions (control)"),
    "rope": Scheme("rotation", ConstantAngles, False, "constant angle per pair (the baseline)"),
    "rope_qkv": Scheme("rotation", ConstantAngles, True, "constant angle per pair, values too (control)"),
    "random_qk": Scheme("rotation", RandomAngles, False, "frozen random angle per token id and pair"),
    "random_qkv": Scheme("rotation", RandomAngles, True, "frozen random angles, values too"),
    "random_qk_v": Scheme("rotation", RandomAngles, RandomValueAngles, "values by other random angles"),
    "fresh_qk": Scheme("rotation", FreshAngles, False, "frozen random angle per prefix (control)"),
    "accum_qk": Scheme("rotation", LearnedAngles, False, "learned angle per token id and pair"),
    "accum_qkv": Scheme("rotation", LearnedAngles, True, "learned angles per token id, values too"),
    "accum_qk_v": Scheme("rotation", LearnedAngles, LearnedValueAngles, "values by other learned angles"),
    "hidden_qk": Scheme("rotation", HiddenAngles, False, "learned angle from the layer's input"),
    "hidden_qkv": Scheme("rotation", HiddenAngles, True, "learned angles from the layer's input, values too"),
    "householder_qk": Scheme("rotation", HiddenReflections, False, "exact reflection from the layer's input"),
    "householder_qkv": Scheme("rotation", HiddenReflections, True, "exact reflections, values too"),
    "path": Scheme("rotation", PathSteps, False, "PaTH: I - beta ww', from the layer's input"),
    "alibi": Scheme("bias", Alibi, False, "key bias slope_h * j (weighs far tokens down)"),
    "fox": Scheme("bias", ForgetGate, False, "Forgetting Transformer: key bias -cumsum(log f)"),
    "logn": Scheme("scale", LogLength, False, "logits times max(1, ln i / ln of the training context)"),
    "ssmax": Scheme("scale", ScalableSoftmax, False, "Scalable-Softmax: logits times s ln i, s learned"),
}


def parse(pos):
    """Split a scheme name such as `rope`, `alibi` or `accum_qkv+alibi+logn`, at most one of each kind in the
    order of KINDS, into (rotation, bias, scale); without a rotation it is nope, without the others None.

    Raises ValueError with the list of schemes for any other name.
    """
    names = pos.split("+")
    kinds = [SCHEMES[name].kind if name in SCHEMES else "unknown" for name in names]
    if kinds != [kind for kind in KINDS if kind in kinds]:
        lists = [[name for name, scheme in SCHEMES.items() if scheme.kind == kind] for kind in KINDS]
        known = "; ".join(f"{kind}: {', '.join(group)}" for kind, group in zip(KINDS, lists))
        raise ValueError(f"unknown scheme '{pos}'; {known}; '+' joins one of each, as in accum_qkv+alibi")
    found = {"rotation": "nope", "bias": None, "scale": None} | dict(zip(kinds, names))
    return tuple(found.values())


class Transport(nn.Module):
    """What a scheme gives to attention. With shared=True the part that all layers share, else the part that
    a layer owns."""

    def __init__(self, config, shared):
        super().__init__()
        rotation, bias, scale = parse(config.pos)
        self.same = SCHEMES[rotation].values is True
        modules = {
            "rotation": SCHEMES[rotation].module,
            "values": None if self.same else SCHEMES[rotation].values,
            "bias": SCHEMES[bias].module if bias else None,
            "scale": SCHEMES[scale].module if scale else None,
        }
        for name, module in modules.items():
            if module and module.shared == shared:
                self.add_module(name, module(config))

    def forward(self, idx, x, past=None):
        """idx (B, T), x (B, T, C) -> a dict of what this part has: rotation, values (transports), bias
        (B|1, H, T_k), scale (B|1, H|1, T)."""
        given, past = {}, {} if past is None else past
        with torch.autocast(x.device.type, enabled=False):  # steps and gates are never bfloat16
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            for name, module in self.named_children():
                given[name] = module(idx, x, past.setdefault(name, {}))
        if self.same and "rotation" in given:
            given["values"] = given["rotation"]
        return given
