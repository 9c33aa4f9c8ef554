"""The theory of "Why Do Accumulated Transformations Extrapolate?" (arXiv 2606.24975) as small functions, checked and measured.

    python theory.py [--seed N]                           every statement against brute force or Monte Carlo; exit status 1 if one fails
    python theory.py RUN ... [--length 65536] [--plot]    the same quantities on trained models and validation text -> RUN/theory.json

The statements are the paper's, proofs and constants our own. Steps M_t are orthogonal, independent, and independent of q and k (if M_i
comes from q_i's token, only the n - 1 steps in between are). Per head: n = i - j steps from key j to query i; B = d/2 blocks (channel
pairs); lam = |q||k|/sqrt(d) bounds a logit, lam_b = |q_b||k_b|/sqrt(d) its block b, V = sum lam_b^2; chi_b(m) = E exp(i m theta_b) of the
angle of a step, r_b = |chi_b(1)|; K near tokens, M far ones; rho the far mass, the share of attention on far tokens; m an ALiBi slope, w
the distance (in tokens) where far begins. What a summary of the theory leaves out stands in the table as rows with "!".
"""
import argparse
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data
import transport
from eval_extrapolate import Progress, check_runs, finite, parse_lengths, pyplot
from model import load_model
from train import pick_device
from transport import SCHEMES, accumulate, cos_sin, parse, rope_steps, rotate

KEYS_AT_ONCE = 4096   # keys that the measurement of a layer scores at a time
QUERIES = 32          # measured per head and stretch of text
TOLERANCE = 0.1       # nats: phases have mixed when the mean logit is this close to its limit
FAR = {"far_mass": ".4f", "predicted": ".4f", "mean_far": ".4f", "worst_case": ".1e", "gap": ".2f",
       "coherence": ".3f", "expected": ".3f", "floor": ".3f", "n_eff^-.5": ".3f"}
i0, i0e, i1e = torch.special.i0, torch.special.i0e, torch.special.i1e
f64 = partial(torch.as_tensor, dtype=torch.float64)


# -----------------------------------------------------------------------------------------------------------
# 1. Transport
def cumulative(M):
    """C_t = M_t C_{t-1}, (T, d, d) -> (T, d, d): P_{j->i} = M_i ... M_{j+1} = C_i C_j^-1 for invertible steps (telescoping)."""
    C = [M[0]]
    for step in M[1:]:
        C.append(step @ C[-1])
    return torch.stack(C)

# 2. Spectral gap and mixing: E P = (E M)^n, so |E q.Pk| <= r^n |q||k|, r = ||E M|| = max_b r_b
def chi_gaussian(m, mu, sigma):
    """E exp(i m theta), theta ~ N(mu, sigma^2): |chi(m)| = r^(m^2), whatever the drift mu."""
    return torch.exp(1j * f64(m * mu) - f64(m * sigma) ** 2 / 2)

def chi_table(theta, p):
    """E exp(i theta) of a table: angles (V, ...), token frequencies p (V,) -> complex (...)."""
    return torch.tensordot(p.to(torch.complex128), torch.exp(1j * theta), 1)

def mixing_window(r, eps, weight=1.0):
    """n_mix(eps): smallest n with sum_b weight_b r_b^n <= eps, for one block ln(1/eps)/ln(1/r) rounded up; inf at r = 1 (RoPE).
    A logit is right to eps after n_mix(eps/lam) steps. r, weight (B,) or numbers -> a number, nan if r is."""
    left = lambda n: float((f64(weight) * f64(r) ** n).sum())
    low, high = -1, 2 ** 40
    if not left(high) <= eps:
        return math.inf if left(1) > 0 else math.nan
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= eps else (middle, high)
    return high

def reflection_moments(n, d, cos):
    """(E s, E s^2), s = q.Pk after n reflections I - 2ww', w uniform, |q| = |k| = 1, q.k = cos: E M = (1 - 2/d) I, the largest gap that
    reflections of any law can have (trace of E ww'); symmetric traceless matrices shrink by (d-2)/(d+2) a step."""
    return (1 - 2 / d) ** n * cos, 1 / d + ((d - 2) / (d + 2)) ** n * (cos ** 2 - 1 / d)

def pair_characters(theta, p):
    """chi(e_b + e_b') and chi(e_b - e_b') of a table: angles (V, B), p (V,) -> two complex (B, B)."""
    return chi_table(theta[:, :, None] + theta[:, None], p), chi_table(theta[:, :, None] - theta[:, None], p)

def torus_moments(theta, p, z, n):
    """(E s, E s^2), s = Re sum_b z_b exp(i Phi_b) after n iid steps of any joint law, z_b = conj(q_b) k_b (B,); E s^2 -> sum |z_b|^2/2."""
    plus, minus = pair_characters(theta, p)
    second = (z[:, None] * z * plus ** n + z[:, None] * z.conj() * minus ** n).real.sum() / 2
    return (z * chi_table(theta, p) ** n).sum().real, second

def torus_gap(theta, p):
    """rho_2 = max of |chi(2 e_b)|, |chi(e_b +- e_b')|, b != b': |E s^2 - limit| <= rho_2^n |q|^2|k|^2. r < 1 does not make it < 1."""
    plus, minus = pair_characters(theta, p)
    return torch.maximum(plus.abs().max(), (minus.abs() - 2 * torch.eye(len(minus))).max())

# 3. Concentration of s = q.Pk, |q| = |k| = 1
def haar_tail(t, d):
    """P(s >= t), P Haar on O(d) or SO(d), d >= 2, exact: c int_{asin t}^{pi/2} cos^(d-2), c = Gamma(d/2)/(sqrt(pi) Gamma((d-1)/2))."""
    x, weight = map(f64, np.polynomial.legendre.leggauss(200))
    half, c = (math.pi / 2 - math.asin(t)) / 2, math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)
    return c * half * (weight * (math.asin(t) + half * (x + 1)).cos() ** (d - 2)).sum()

def haar_tail_bound(t, d):
    """P(s >= t) <= 1/2 min((1 - t^2)^((d-1)/2), exp(-d t^2/2)), 0 <= t <= 1, d >= 2 (cap; E e^(as) <= e^(a^2/2d)). Twice that for |s|."""
    return 0.5 * min((1 - t * t) ** ((d - 1) / 2), math.exp(-d * t * t / 2))

def haar_mgf(a, d):
    """F_d(a) = E exp(a s) = 0F1(; d/2; a^2/4) <= exp(a^2/2d)."""
    k = torch.arange(500, dtype=torch.float64)
    return torch.exp(2 * k * math.log(a / 2) - torch.lgamma(k + 1) + math.lgamma(d / 2) - torch.lgamma(k + d / 2)).sum()

def blocks_tail(t, r, proxy=1.0):
    """P(S >= mean + t) <= exp(-t^2/(2 proxy sum r_b^2)), S = sum_b r_b cos(Phi_b), Phi_b independent across blocks, r (B,) >= 0.
    proxy 1: any law, any n, mean = sum r_b |chi_b|^n (Hoeffding). proxy 1/2: uniform phases, mean 0 (I_0(x) <= e^(x^2/4)).
    The energy must be spread: the effective dimension is 2 (sum r_b)^2/sum r_b^2, 2 if one block holds it all."""
    return torch.exp(-t * t / (2 * proxy * (r ** 2).sum()))

def blocks_tail_finite(t, r, chi, n):
    """Proxy 1/2 after n steps takes the harmonics chi_b(m), (m_max, B), m = 1, 2, ...: with S = sum r_b^2 (I_m/I_0 <= (x/2)^m/m!)
    P(S >= sum r_b |chi_b|^n + t) <= exp(-t^2/S + 2 sum_b sum_{m>=2} |chi_b(m)|^n (t r_b/S)^m/m!)."""
    S, m = (r ** 2).sum(), torch.arange(2, len(chi) + 1, dtype=torch.float64)[:, None]
    return torch.exp(-t * t / S + 2 * (chi[1:].abs() ** n * (t * r / S) ** m / torch.exp(torch.lgamma(m + 1))).sum())

# 4. Score gap: M far tokens on one path, dependent in any way; logits within lam
def far_threshold_haar(M, delta, d):
    """All far logits are <= lam times this with probability 1 - delta (union bound over haar_tail_bound)."""
    return min(math.sqrt(2 * math.log(M / (2 * delta)) / d), math.sqrt(1 - (2 * delta / M) ** (2 / (d - 1))))

def far_threshold_blocks(M, delta, lam_b, proxy=1.0, mean=0.0):
    """All far logits are <= this with probability 1 - delta (blocks_tail with its proxy and mean). It grows with log M: there is no gap
    with high probability for every length. What does not depend on the length is an expectation, the next function."""
    return mean + math.sqrt(2 * proxy * (lam_b ** 2).sum() * math.log(M / delta))

def far_partition(lam_b):
    """Phi = E exp(far logit) = prod_b I_0(lam_b) <= exp(V/4) for mixed phases (Haar: haar_mgf(lam, d)), at every length. It pins the far
    mass: M e^mean/(M e^mean + Z_near) <= rho (Jensen; the mean far logit is ~ 0) and E rho <= M Phi/(M Phi + Z_near)."""
    return i0(lam_b).prod(-1)

# 5. Far mass
def far_mass(M, K, gap=0.0):
    """rho = M/(M + K exp(gap)), an identity for gap = Delta_eff = logmeanexp(near logits) - logmeanexp(far logits), hence a lower bound
    for gap = 2 lam if |logits| <= lam (equality: near +lam, far -lam) or, sharper, max near - mean far (Jensen); an upper bound for a
    certified score gap min near - max far. The theory says that Delta_eff is constant in L, so that one length predicts all."""
    return torch.sigmoid(torch.log(f64(M) / f64(K)) - f64(gap))

def forced_length(f, K, lam):
    """Length from which far mass >= f whatever the rotations: K + ceil(f/(1-f) K exp(2 lam)). At lam = 8 that is asymptotic, exp(16)."""
    return K + math.ceil(f / (1 - f) * K * math.exp(2 * lam))

# 6. Distance bias: logits s - m n, |s| <= lam, near 0 <= n < w, far w <= n < L
def alibi_far_bound(w, m, lam, L=math.inf):
    """rho <= R/(1+R), R = exp(2 lam) (exp(-mw) - exp(-mL))/(1 - exp(-mw)); tight (s = lam far, -lam near). The same for forget gates
    with log f_t <= -m at every token (Forgetting Transformer). rho <= f at every length beyond w = ln(1 + exp(2 lam) (1-f)/f)/m."""
    R = math.exp(2 * lam) * (math.exp(-m * w) - math.exp(-m * L)) / -math.expm1(-m * w)
    return R / (1 + R)

def bias_far_bound(bias, w, lam):
    """Any bias b(n), (L,): rho <= R/(1+R), R = exp(2 lam) sum_{n>=w} e^b(n)/sum_{n<w} e^b(n). Uniform in L iff sum e^b(n) < inf;
    otherwise the near mass goes to 0: -a ln n needs a > 1, and a bias that saturates (T5) is not enough."""
    return torch.sigmoid(2 * lam + bias[w:].logsumexp(0) - bias[:w].logsumexp(0))

# 7. Values: far output sum_j alpha_j P_{j->i} v_j, v_j = c + xi_j
def value_gain(r):
    """kappa = (1+r)/(1-r): E |sum alpha_j P_j c|^2 <= kappa |c|^2 sum alpha^2 for alpha independent of the steps, r = ||E M||; inf at 1.
    Steps need not commute: P_k' P_j = P_{j->k} for any orthogonal ones (reflections: kappa = d - 1)."""
    return (1 + f64(r)) / (1 - f64(r))

def value_moment(alpha, chi):
    """E |sum alpha_j P_j c|^2/|c|^2 = sum_jk alpha_j alpha_k Re chi^|j-k|, exact for fixed alpha (M,). Reflections: chi = 1 - 2/d."""
    lag, chi = torch.arange(len(alpha)), torch.as_tensor(chi, dtype=torch.complex128)
    return alpha @ (chi ** (lag[:, None] - lag).abs()).real @ alpha

def value_uniform(M, chi):
    """value_moment of alpha = 1/M in closed form, chi != 1; -> (1 - r^2)/|1 - chi|^2/M. Drift helps: RoPE's values decohere too (r = 1)."""
    return (M + 2 * (chi / (1 - chi) * (M - (1 - chi ** M) / (1 - chi))).real) / M ** 2

def value_floor(lam_b):
    """Coherence left when the weights come from the same phases: |sum alpha_j exp(i Phi_j,b)|/rho -> I_1/I_0(lam_b) ~ lam_b/2, M -> inf
    (one key for all far tokens), and n_eff/M -> prod_b I_0(lam_b)^2/I_0(2 lam_b), n_eff = (sum alpha)^2/sum alpha^2."""
    return i1e(lam_b) / i0e(lam_b)

def far_output(c2, coherent, kappa, n_eff, noise=0.0):
    """E |far output|^2/rho^2 ~ sum_b c2_b min(1, coherent_b^2 + kappa_b/n_eff) + noise/n_eff, c2_b = |c_b|^2, noise = E |xi|^2: to 20 % in
    simulations, high with drift. coherent: 1 if values stay where they are, value_floor if carried, 0 if carried by angles of their own."""
    return (c2 * (coherent ** 2 + kappa / n_eff[..., None]).clamp(max=1)).sum(-1) + noise / n_eff

# 8. Rotation and bias: section 6 as it stands (|s| <= lam either way), section 4 improved
def biased_partition(Phi, m, w, L):
    """E Z_far = Phi (exp(-mw) - exp(-mL))/(1 - exp(-m)) for mixed phases; E rho <= E Z_far/(E Z_far + Z_near)."""
    return Phi * (math.exp(-m * w) - math.exp(-m * L)) / -math.expm1(-m)

def biased_value_moment(m, w, chi):
    """E |far output|^2/|c|^2, flat scores, L = inf: exp(-2mw) tanh(m/2) Re((1 + a chi)/(1 - a chi)), a = exp(-m). No gain if m >> 1 - r."""
    a = math.exp(-m) * chi
    return math.exp(-2 * m * w) * math.tanh(m / 2) * ((1 + a) / (1 - a)).real


# -----------------------------------------------------------------------------------------------------------
# The table

def check(section, claim, formula, relation, value):
    """A row of the table. value: a number, or samples (N,), booleans too, of which mean and standard error are taken.
    "=" to 1e-12, "~" within 5 standard errors, "<=" and ">=" with 4 to spare, "<" by more than 4 (read: formula < value)."""
    x, formula = f64(value).flatten(), float(formula)
    mean, error = float(x.mean()), float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else 0.0
    if torch.as_tensor(value).dtype == torch.bool:
        error = math.sqrt(max(mean * (1 - mean), 1 / len(x)) / len(x))       # not 0 if nothing was seen
    over, tiny = mean - formula, 1e-12 * max(1, abs(formula))
    holds = {"=": abs(over) <= tiny, "~": abs(over) <= 5 * error + tiny, "<": over > 4 * error,
             "<=": over >= -4 * error - tiny, ">=": over <= 4 * error + tiny}
    return {"section": section, "formula": formula, "": relation, "simulated": mean, "+-": error, "holds": holds[relation], "claim": claim}


def claims(seed=0, scale=1.0):
    """Yield the arguments of `check` for every row; scale shrinks the Monte Carlo. Of a claim about many cases the worst is shown."""
    g = torch.Generator().manual_seed(seed)
    N = lambda n: max(2, int(n * scale))
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    rand = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    full = lambda n, x: torch.full((n,), x, dtype=torch.float64)
    count = lambda n: torch.arange(1, n + 1, dtype=torch.float64)
    sphere = lambda *shape: F.normalize(randn(*shape), dim=-1)
    coin = lambda *shape: (rand(*shape) - 0.5).sign()
    sample = lambda p, *shape: torch.multinomial(p, math.prod(shape), replacement=True, generator=g).view(shape)
    zipf = lambda n: (1 / count(n)) / (1 / count(n)).sum()
    eye = lambda d: torch.eye(d, dtype=torch.float64)
    reflection = lambda w: eye(w.size(-1)) - 2 * w[..., :, None] * w[..., None, :]
    reflect = lambda x, w: x - 2 * (x * w).sum(-1, keepdim=True) * w
    cis = lambda phase: torch.exp(1j * f64(phase))
    def walk(paths, M, B, sigma, start=0):
        """Phases (paths, M, B) at distances start + 1 ... start + M on paths of N(0, sigma^2) steps."""
        steps = sigma * randn(paths, M, B)
        steps[:, 0] *= math.sqrt(start + 1)
        return steps.cumsum_(1)

    # 1. transport: reflections, which do not commute
    T, d = 12, 6
    q, k, v, M, alpha = randn(T, d), randn(T, d), randn(T, d), reflection(sphere(T, d)), rand(T, T).tril()
    path = eye(d).repeat(T, T, 1, 1)                                         # path[i, j] = M_i ... M_{j+1}
    for i, j in ((i, j) for i in range(T) for j in range(i)):
        path[i, j] = M[i] @ path[i - 1, j]
    C, encode = cumulative(M), lambda x: torch.einsum("tba,tb->ta", cumulative(M), x)
    error = torch.einsum("ia,ijab,jb->ij", q, path, k) - encode(q) @ encode(k).T
    yield 1, "q_i.P_ji k_j = (C_i'q_i).(C_j^-1 k_j), largest error", 0, "=", error.tril().abs().max()
    error = torch.einsum("ij,ijab,jb->ia", alpha, path, v) - torch.einsum("iab,ib->ia", C, alpha @ encode(v))
    yield 1, "sum_j a_ij P_ji v_j = C_i sum_j a_ij C_j^-1 v_j, largest error", 0, "=", error.abs().max()
    C = cumulative(torch.linalg.qr(randn(60, 3, 3))[0]).mT                   # M' in place of M: C_t = M_1 ... M_t
    scores = torch.einsum("ia,jab,ibc,jc->ij", randn(60, 3), C.mT, C, randn(60, 3))
    yield 1, "! the other order, M_{j+1} ... M_i, does not factor: rank of the scores, d = 3", 3, "<", torch.linalg.matrix_rank(scores)
    C = cumulative(eye(4) - 0.75 * (eye(4) - reflection(sphere(9, 4))))
    yield 1, "! I - beta ww', beta < 2, needs C_j^-1: error of C_j'", 0.01, "<", (C[8] @ (C[3].inverse() - C[3].mT)).abs().max()
    # 2. spectral gap and mixing
    p, theta = zipf(50), 0.7 * randn(50)
    phase = theta[sample(p, N(40000), 5)].sum(-1)
    yield 2, "E cos(phase) = Re chi^n, 5 tokens of Zipf text", (chi_table(theta, p) ** 5).real, "~", phase.cos()
    yield 2, "E cos(2 theta), Gaussian angles", chi_gaussian(2, 0.4, 0.5).real, "~", (0.8 + randn(N(50000))).cos()
    r, weight = 0.99 * rand(8), rand(8)
    first = next(n for n in range(10 ** 6) if (weight * r ** n).sum() <= 0.01)
    yield 2, "n_mix: first n with sum_b weight_b r_b^n <= .01", mixing_window(r, 0.01, weight), "=", first
    yield 2, "! RoPE never mixes: r of a constant step", 1, "=", chi_table(rope_steps(7, 64), zipf(7)).abs().min()
    phase = 1.25 * (coin(N(40000), 1) * (rand(N(40000), 40) - 0.01).sign().cumprod(1)).sum(1)    # +-1.25, kept with probability .99
    yield 2, "! text is not iid: sticky Markov text beats |chi|^n, n = 40", math.cos(1.25) ** 40, "<", phase.cos()
    x = eye(8)[0].expand(N(100000), 8)
    for _ in range(6):
        x = reflect(x, sphere(N(100000), 8))
    s, (first, second) = 0.6 * x[:, 0] + 0.8 * x[:, 1], reflection_moments(6, 8, 0.6)
    yield 2, "E s = (1 - 2/d)^n q.k, 6 reflections", first, "~", s
    yield 2, "E s^2 = 1/d + ((d-2)/(d+2))^n ((q.k)^2 - 1/d)", second, "~", s ** 2
    laws = reflection(F.normalize(randn(100, 64, 8) @ randn(100, 8, 8), dim=-1)).mean(1)
    yield 2, "a reflection has ||E M|| >= 1 - 2/d, any law of w", 1 - 2 / 8, "<=", torch.linalg.matrix_norm(laws, 2).min()
    p, theta, z = zipf(6), randn(6, 3), torch.complex(randn(3), randn(3))
    s, (first, second) = (z * cis(theta[sample(p, N(100000), 3)].sum(1))).real.sum(-1), torus_moments(theta, p, z, 3)
    yield 2, "E s of 3 dependent blocks, n = 3", first, "~", s
    yield 2, "E s^2 of the same", second, "~", s ** 2
    off = (torus_moments(theta, p, z, 10)[1] - (z.abs() ** 2).sum() / 2).abs()
    yield 2, "|E s^2 - limit| <= rho_2^n |q|^2|k|^2, n = 10", z.abs().sum() ** 2 * torus_gap(theta, p) ** 10, ">=", off
    yield 2, "! ||E M|| < 1 is not enough: M = +-I, E M = 0, keeps s^2 = (q.k)^2 > 1/d", 1 / 64, "<", (0.6 * coin(N(1000), 20).prod(1)) ** 2
    yield 2, "! nor are blocks of one shared angle: rho_2 = 1, whatever r_b", 1, "=", torus_gap(randn(6, 1).expand(6, 2), p)
    # 3. concentration
    yield 3, "P(s >= .3), Haar, d = 16", haar_tail(0.3, 16), "~", sphere(N(200000), 16)[:, 0] >= 0.3
    ratio = max(haar_tail(t, d) / haar_tail_bound(t, d) for t in (0.05, 0.1, 0.2, 0.4, 0.8, 0.95) for d in (2, 3, 4, 5, 8, 16, 64, 129))
    yield 3, "P(s >= t) <= 1/2 min((1-t^2)^((d-1)/2), e^(-dt^2/2)), largest ratio", 1, ">=", ratio
    yield 3, "E e^(8s) = F_d(8), d = 64", haar_mgf(8, 64), "~", (8 * sphere(N(100000), 64)[:, 0]).exp()
    r, chi = (1 + rand(16)) / 24, torch.stack([chi_gaussian(m, 0, 1.0) for m in range(1, 30)])[:, None].expand(-1, 16)
    uniform, t = 2 * math.pi * rand(N(200000), 16), 2.5 * (r ** 2).sum().sqrt()
    high = (r * coin(N(200000), 16)).sum(-1) >= t                            # angles in {0, pi}
    yield 3, "P(S >= mean + t) <= e^(-t^2/2 sum r^2), any law, 16 blocks", blocks_tail(t, r), ">=", high
    yield 3, "! not e^(-t^2/sum r^2): angles in {0, pi} have harmonics", blocks_tail(t, r, 0.5), "<", high
    t, S = t / math.sqrt(2), (r * walk(N(200000), 1, 16, 1.0, start=1)[:, 0].cos()).sum(-1)      # 2 Gaussian steps
    yield 3, "P(S >= t) <= e^(-t^2/sum r^2), uniform phases", blocks_tail(t, r, 0.5), ">=", (r * uniform.cos()).sum(-1) >= t
    yield 3, "P(S >= mean + t) <= the same with harmonics", blocks_tail_finite(t, r, chi, 2), ">=", S >= (r * chi[0].abs() ** 2).sum() + t
    high = uniform[:, 0].cos() >= 0.8                                        # cos of one uniform phase
    yield 3, "! energy in one block: P(s >= .8) = acos(.8)/pi, whatever d", math.acos(0.8) / math.pi, "~", high
    yield 3, "! blocks of one shared angle: the same, far above the bound for d = 64", haar_tail_bound(0.8, 64), "<", high
    # 4. score gap: d = 64, lam = 8 spread evenly, M far tokens, 8 near ones of logit 6
    lam_b, M, near, haar = full(32, 0.25), 4096, 8 * math.exp(6), sphere(N(300), 4096, 8)[..., 0]
    s = torch.cat([(lam_b * walk(10, M, 32, 0.5, start=120).cos_()).sum(-1) for _ in range(N(10))])
    Z, Phi, high = s.exp().sum(-1), far_partition(lam_b), s.amax(-1) > far_threshold_blocks(M, 0.05, lam_b, 0.5)
    rho = Z / (Z + near)
    yield 4, "P(a far logit > threshold) <= .05, M = 4,096, SO(2) blocks", 0.05, ">=", high
    threshold = far_threshold_haar(100, 0.05, 8)
    yield 4, "P(a far logit > threshold) <= .05, M = 100, Haar, d = 8", 0.05, ">=", haar[:, :100].amax(-1) > threshold
    yield 4, "! no gap for every length: the same threshold at M = 4,096", 0.05, "<", haar.amax(-1) > threshold
    yield 4, "E e^logit = Phi = prod_b I_0(lam_b)", Phi, "~", Z / M
    yield 4, "E rho <= M Phi/(M Phi + Z_near)", far_mass(M * Phi, near), ">=", rho
    yield 4, "rho - M e^mean/(M e^mean + Z_near) >= 0, smallest", 0, "<=", (rho - far_mass(M * s.mean(-1).exp(), near)).min()
    # 5. far mass: K = 8 near and M = 50 far logits, uniform or extreme within +-lam
    K, M, lam = 8, 50, 4 * rand(2000, 1)
    logits = lam * torch.where(rand(2000, 1) < 0.5, 2 * rand(2000, K + M) - 1, coin(2000, K + M))
    rho, near, far = logits.softmax(-1)[:, K:].sum(-1), logits[:, :K], logits[:, K:]
    gap = (near.logsumexp(-1) - math.log(K)) - (far.logsumexp(-1) - math.log(M))
    yield 5, "rho - M/(M + K e^(2 lam)) >= 0, smallest", 0, "<=", (rho - far_mass(M, K, 2 * lam[:, 0])).min()
    yield 5, "rho - M/(M + K e^(max near - mean far)) >= 0, smallest", 0, "<=", (rho - far_mass(M, K, near.amax(-1) - far.mean(-1))).min()
    yield 5, "rho = M/(M + K e^Delta_eff), largest error", 0, "=", (rho - far_mass(M, K, gap)).abs().max()
    extreme = torch.cat((full(64, 8.0), full(65472, -8.0))).softmax(0)
    yield 5, "equality: near +8, far -8, K = 64, L = 65,536", far_mass(65472, 64, 16), "=", extreme[64:].sum()
    first = next(M for M in range(10 ** 6) if M >= 64 * math.exp(4))         # as much far as near, at -lam and +lam
    yield 5, "rho >= 1/2 is forced from this length, lam = 2, K = 64", forced_length(0.5, 64, 2), "=", first + 64
    yield 5, "! e^(2 lam) is asymptotic: lam = 8, K = 64 forces 1/2 only beyond 65,536", 65536, "<", forced_length(0.5, 64, 8)
    # 6. distance bias
    lam, m, w, n = 4 * rand(1000, 1), 0.01 + 0.3 * rand(1000, 1), 1 + (60 * rand(1000, 1)).long(), torch.arange(300)
    s, far = lam * (2 * rand(1000, 300) - 1), lambda logits: logits.softmax(-1).masked_fill(n < w, 0).sum(-1)
    bound = f64([alibi_far_bound(int(w), float(m), float(lam), 300) for w, m, lam in zip(w, m, lam)])
    yield 6, "ALiBi: rho - R/(1+R) <= 0, largest", 0, ">=", (far(s - m * n) - bound).max()
    yield 6, "equality: far +lam, near -lam, largest error", 0, "=", (far(torch.where(n < w, -lam, lam) - m * n) - bound).abs().max()
    gates = torch.cat((torch.zeros(1000, 1), (m - 0.05 * rand(1000, 299).log()).cumsum(-1)), 1)
    yield 6, "forget gates f <= e^-m: rho - R/(1+R) <= 0, largest", 0, ">=", (far(s - gates) - bound).max()
    long, limit = count(10 ** 6), 1 - (count(64) ** -2).sum() / (math.pi ** 2 / 6)
    yield 6, "bias -2 ln(1+n): rho beyond 64 stays under its limit", limit, ">=", bias_far_bound(-2 * long.log(), 64, 0)
    for name, bias in ("-ln(1+n)", -long.log()), ("-min(n/8, 8), which saturates", -(long / 8).clamp(max=8)):
        yield 6, f"! bias {name}: rho at 512 tokens < at a million", bias_far_bound(bias[:512], 64, 0), "<", bias_far_bound(bias, 64, 0)
    # 7. values
    M, chi, alpha, beta = 200, chi_gaussian(1, 0.3, 0.4), (2 * randn(200)).softmax(0), (2 * randn(60)).softmax(0)
    out = cis(walk(N(10000), M, 1, 0.4)[..., 0] + 0.3 * torch.arange(M)) @ (alpha + 0j)
    yield 7, "E |sum alpha P c|^2 = sum alpha alpha Re chi^|j-k|, SO(2)", value_moment(alpha, chi), "~", out.abs() ** 2
    out = torch.zeros(N(10000), 8, dtype=torch.float64)
    for a in beta:
        out = reflect(out + a * eye(8)[0], sphere(N(10000), 8))
    yield 7, "! steps need not commute: the same for reflections, chi = 1 - 2/d", value_moment(beta, 0.75), "~", (out ** 2).sum(-1)
    worst = max(value_moment(a, r * cis(mu)) / (value_gain(r) * (a ** 2).sum())
                for a in (full(M, 1 / M), alpha) for r in (0.1, 0.5, 0.9, 0.99) for mu in (0, 0.7))
    yield 7, "E |sum alpha P c|^2 <= kappa sum alpha^2, largest ratio", 1, ">=", worst
    yield 7, "uniform weights in closed form", value_uniform(M, chi), "=", value_moment(full(M, 1 / M), chi)
    yield 7, "! RoPE's values decohere too (r = 1): Dirichlet's kernel", value_uniform(M, cis(2)), "=", (math.sin(M) / M / math.sin(1)) ** 2
    yield 7, "! angles need not mix: turns by pi, random axes of SO(3), E x.Mx", -1 / 3, "~", 2 * sphere(N(20000), 3)[:, 0] ** 2 - 1
    lam_b, phase = full(4, 0.8), torch.cat([walk(4, 5000, 4, 0.5) for _ in range(N(40))])        # one key for all far tokens
    weight = (lam_b * phase.cos()).sum(-1, keepdim=True).exp()
    out, n_eff = (weight * cis(phase)).sum(1) / weight.sum(1), (weight.sum(1) ** 2 / (weight ** 2).sum(1))[:, 0]
    yield 7, "weights from the same phases: coherence I_1/I_0(lam_b), not 0", value_floor(lam_b)[0], "~", out.real.mean(-1)
    yield 7, "! so kappa/n_eff does not bound |O|^2, M = 5,000", value_gain(0.8825) / n_eff.mean(), "<", out.abs().square().mean(-1)
    yield 7, "n_eff/M = prod_b I_0(lam_b)^2/I_0(2 lam_b)", (i0(lam_b) ** 2 / i0(2 * lam_b)).prod(), "~", n_eff / 5000
    still = far_output(f64([4.0]), 1.0, 0.0, 1 / (alpha ** 2).sum(), 1.0)
    yield 7, "values not carried: E |O|^2 = |c|^2 + E |xi|^2 sum alpha^2", still, "~", ((2 + randn(N(10000), M)) @ alpha) ** 2
    # 8. rotation and bias
    lam_b, m, w, L, near, alpha = full(32, 0.25), 0.02, 64, 1024, 40.0, (-0.05 * count(1000)).softmax(0)
    s = torch.cat([(lam_b * walk(20, L - w, 32, 0.5, start=120).cos_()).sum(-1) for _ in range(N(20))]) - m * torch.arange(w, L)
    Z, expected, flat = s.exp().sum(-1), biased_partition(far_partition(lam_b), m, w, L), value_moment(alpha * (count(1000) > 20), chi)
    yield 8, "E Z_far = Phi (e^-mw - e^-mL)/(1 - e^-m)", expected, "~", Z
    yield 8, "E rho <= E Z_far/(E Z_far + Z_near), at every length", far_mass(expected, near), ">=", Z / (Z + near)
    yield 8, "flat scores: e^(-2mw) tanh(m/2) Re((1+a chi)/(1-a chi))", biased_value_moment(0.05, 20, chi), "=", flat
    yield 8, "! no gain if m >> 1 - r: |O|^2 over a coherent sum's, r = .99", 0.95, "<", biased_value_moment(1, 64, 0.99) / math.exp(-128)


# -----------------------------------------------------------------------------------------------------------
# A trained model

def step_statistics(turn, lags):
    """Steps of a text from its phases, a (cos, sin) pair of (1, H|1, T, B) -> r (H|1, B), and decoherence curves (len(lags), H|1, B) of the
    text and of its steps in random order, which r^n describes. The mean over positions weights a table by token frequency."""
    def coherence(phase, lags):                                              # |mean_t exp(i (phase_t - phase_{t-n}))|, unbiased: (lags, B)
        z = torch.exp(1j * phase)
        squares = [(z[n:] * z[:-n].conj()).mean(0).abs() ** 2 * (1 + 1 / (len(z) - n)) - 1 / (len(z) - n) for n in lags]
        return torch.stack(squares).clamp(0, 1).sqrt()
    order, found = torch.randperm(turn[0].size(2) - 1, generator=torch.Generator().manual_seed(0)).to(turn[0].device), []
    for phase in torch.atan2(turn[1][0].double(), turn[0][0].double()):      # a head at a time: (T, B)
        shuffled = accumulate(phase.diff(dim=0)[order], torch.float64)
        found.append((coherence(phase, [1])[0], coherence(phase, lags), coherence(shuffled, lags)))
    return [torch.stack(x, dim=-2) for x in zip(*found)]


def layer_statistics(q, k, v, turn, rotate_values, key_bias, rows, near, r):
    """A layer at the query positions rows (Q,), ascending and >= near: q, k, v (1, H, T, d), turn a (cos, sin) pair or None, the rest as in
    transport.attend, r (H|1, B). Streams over blocks of keys: no more than Q x KEYS_AT_ONCE logits of a head at a time, in float32.
    -> edges of log-spaced buckets of distance, and a dict: logit statistics (buckets, H, Q), far mass and values (H, Q), energy (H, B)."""
    H, T, d = q.shape[1:]
    edges = sorted({0, near, T, *(2 ** i for i in range(T.bit_length()))})
    shape = (len(edges) - 1, H, len(rows))
    take = lambda x, at: x[:, :, at].float()
    carry = lambda x, at: take(x, at) if turn is None else rotate(take(x, at), (take(turn[0], at), take(turn[1], at)))
    blocks = lambda x: x.unflatten(-1, (2, -1)).norm(dim=-2)                 # (..., d) -> lengths (..., B)
    lse, lse2, top = (q.new_full(shape, -math.inf, dtype=torch.float32) for _ in range(3))   # logsumexp of logits, of 2 logits; maximum
    count, total, square = (q.new_zeros(shape, dtype=torch.float64) for _ in range(3))
    out = q.new_zeros(*shape, d + 1, dtype=torch.float32)                    # softmax mean of (v, |v|) in a bucket
    for start in range(0, T, KEYS_AT_ONCE):
        at = slice(start, min(start + KEYS_AT_ONCE, T))
        values = (carry(v, at) if rotate_values else take(v, at))[0]
        values = torch.cat((values, values.norm(dim=-1, keepdim=True)), dim=-1)
        logits = (carry(q, rows) @ carry(k, at).mT)[0] / math.sqrt(d)        # (H, Q, N)
        if key_bias is not None:
            logits += (key_bias[0, :, None, at] - key_bias[0, :, rows, None]).float()
        n = rows[:, None] - torch.arange(at.start, at.stop, device=rows.device)
        for b, (low, high) in enumerate(zip(edges, edges[1:])):
            inside = (n >= low) & (n < high)                                 # (Q, N)
            if inside.any():
                x = logits.masked_fill(~inside, -math.inf)
                new = torch.logaddexp(lse[b], x.logsumexp(-1))
                base = new.clamp(min=-1e30)                                  # -inf where a query has no key in the bucket
                out[b] = out[b] * (lse[b] - base).exp()[..., None] + (x - base[..., None]).exp() @ values
                lse[b], lse2[b], top[b] = new, lse2[b].logaddexp((2 * x).logsumexp(-1)), top[b].maximum(x.amax(-1))
                x = (logits * inside).double()
                count[b], total[b], square[b] = count[b] + inside.sum(-1), total[b] + x.sum(-1), square[b] + x.square().sum(-1)
    far, old = edges.index(near), slice(int(rows[0]) - near + 1)             # keys that are far for all queries
    M, near_lse, far_lse = count[far:].sum(0), lse[:far].logsumexp(0).double(), lse[far:].logsumexp(0).double()
    output = ((lse[far:] - far_lse).exp()[..., None] * out[far:]).sum(0)     # sum_far alpha (v, |v|)/rho
    n_eff = (2 * far_lse - lse2[far:].logsumexp(0)).exp()
    queries, keys, c2 = blocks(take(q, rows)[0]), take(k, slice(T))[0], blocks(take(v, old)[0].mean(1)) ** 2
    lam = queries.norm(dim=-1) * keys.norm(dim=-1).amax(-1)[:, None] / math.sqrt(d)
    rise = 0 if key_bias is None else key_bias[0][:, rows] - key_bias[0][:, :1]      # of a bias that does not fall towards the query
    coherent = value_floor(queries * blocks(keys[:, old].mean(1))[:, None] / math.sqrt(d)) if rotate_values else torch.ones_like(queries)
    kappa, noise = value_gain(r)[:, None] if rotate_values else 0.0, take(v, old)[0].var(1, correction=0).sum(-1, keepdim=True)
    rms = lambda kappa, noise: far_output(c2[:, None], coherent, kappa, n_eff, noise).sqrt() / output[..., -1]
    return edges, {
        "count": count, "total": total, "square": square, "top": top, "lse": lse, "M": M,
        "energy": queries.mean(1) * blocks(keys).mean(1) / math.sqrt(d), "far_mass": torch.sigmoid(far_lse - near_lse),
        "gap": (near_lse - math.log(near)) - (far_lse - M.log()), "worst_case": far_mass(M, near, 2 * lam + rise),
        "mean_far": far_mass(M, near, top[:far].amax(0) - total[far:].sum(0) / M), "n_eff^-.5": n_eff.rsqrt(),
        "coherence": output[..., :-1].norm(dim=-1) / output[..., -1], "expected": rms(kappa, noise), "floor": rms(0.0, 0.0)}


def record(model, idx, see):
    """A forward pass of token ids (1, T) that shows see(layer, q, k, v, turn, rotate_values, key_bias) what every layer gives to
    transport.attend. Raises ValueError for a scheme that attends in another way."""
    real, layers = transport.attend, iter(range(model.config.n_layer))
    def attend(q, k, v, phase=None, rotate_values=False, key_bias=None, *rest, **more):
        see(next(layers), q, k, v, None if phase is None else cos_sin(phase), rotate_values, key_bias)
        return real(q, k, v, phase, rotate_values, key_bias, *rest, **more)
    transport.attend = attend
    try:
        model.hidden(idx)
    finally:
        transport.attend = real
    if next(layers, None) is not None:
        raise ValueError(f"{model.config.pos} does not go through transport.attend, where theory.py measures")


def show(title, rows, columns):
    """Print a table: a line per dict of rows, a column per key with its format."""
    print(f"\n{title}\n" + " ".join(f"{key:>10}" for key in columns))
    for row in rows:
        print(" ".join(f"{row[key]:>10{spec}}" for key, spec in columns.items()))


@torch.no_grad()
def measure(run, args):
    """Measure a run at the same query tokens for every length, write run/theory.json, print its tables; -> the JSON's dict.
    Means are over text, heads and, in "far" and "logits", layers; "heads" has them apart, r and energy by block."""
    device = torch.device(pick_device(args.device))
    model, saved = load_model(run / "ckpt.pt", device)
    block, folder, c = saved["train_config"]["block_size"], data.find(saved["train_config"]["data"]), model.config
    if not 16 <= block <= args.length or args.windows < 1:
        raise ValueError(f"{run}: needs a training context ({block}) of 16 or more, --length {args.length} no shorter, --windows 1 or more")
    val, lengths, near = data.load(folder, "val", args.length, c.vocab_size), parse_lengths("", block, args.length), block // 4
    ends = np.unique(np.linspace(args.length, len(val), args.windows).astype(np.int64))
    progress = Progress(model, run.name, [(n, n) for n in lengths for _ in ends])
    lags, steps, stats, edges = [2 ** i for i in range(args.length.bit_length() - 3)], [], {}, {}

    def see(layer, q, k, v, turn, *how):
        if len(steps) == layer:                                              # in the first pass, the longest
            none = torch.zeros_like(q[:, :1, :, ::2])
            steps.append(step_statistics(turn or (none.cos(), none), lags))
        edges[n], found = layer_statistics(q, k, v, turn, *how, rows, near, steps[layer][0])
        stats.setdefault(n, []).append(found)

    record(model, torch.zeros(1, 2, dtype=torch.long, device=device), lambda *_: None)           # refuse before the work
    for n in reversed(lengths):
        rows = torch.linspace(n - block // 2, n - 1, QUERIES, device=device).long()
        for end in ends:
            record(model, torch.from_numpy(val[end - n:end].astype(np.int64))[None].to(device), see)
            progress.tick(n, n)
        stats[n] = {key: torch.stack([s[key] for s in stats[n]]).unflatten(0, (len(ends), -1)).double().cpu() for key in stats[n][0]}

    result = {"run": run.name, "pos": c.pos, "step": saved["step"], "train_context": block, "near": near, "data": folder.name,
              "windows": len(ends), "queries": QUERIES, "steps": [], "decoherence": [], "logits": [], "far": []}
    energy = stats[args.length]["energy"].mean(0)                            # (layers, H, B)
    share = energy / energy.sum((1, 2), keepdim=True) / len(energy)          # of all blocks, sum 1
    r, text, shuffled = (torch.stack(x).cpu().expand(*[-1] * (x[0].dim() - 1), c.n_head, -1) for x in zip(*steps))
    if SCHEMES[parse(c.pos)[0]].step == "reflection":
        r, text, shuffled = r * math.nan, text * math.nan, shuffled * math.nan                   # no angles to measure
    for layer, (r_b, e) in enumerate(zip(r, energy)):                        # (H, B)
        lam, n_mix = e.sum(-1, keepdim=True), [mixing_window(r_h, TOLERANCE, e_h) for r_h, e_h in zip(r_b, e)]
        part = lambda x: float((e * x).sum() / e.sum())
        result["steps"].append({
            "layer": layer, "least r": float(r_b.min()), "mean r": part(r_b), "most r": float(r_b.max()), "lam": float(lam.mean()),
            "n_mix": max(n_mix), "unmixed": part((lam * r_b ** block > TOLERANCE) + 0 * r_b),    # nan if r is
            "heads": {"n_mix": n_mix, "r": r_b.tolist(), "energy": e.tolist()}})
    for i, n in enumerate(lags):
        curves = {"text": text[:, i], "r^n": r ** n, "shuffled": shuffled[:, i]}
        result["decoherence"].append({"n": n} | {key: float((share * x).sum()) for key, x in curves.items()})
    for n, s in sorted(stats.items()):
        for b, (low, high) in enumerate(zip(edges[n], edges[n][1:])):
            count, total, square, top, lse = (s[key][:, :, b] for key in ("count", "total", "square", "top", "lse"))
            mean, second = float(total.sum() / count.sum()), float(square.sum() / count.sum())
            result["logits"].append({"context": n, "from": low, "below": high, "mean": mean, "std": max(0.0, second - mean ** 2) ** 0.5,
                                     "max": float(top.max()), "logmeanexp": float((lse - count.log())[count > 0].mean())})
        s["predicted"] = far_mass(s["M"], near, stats[block]["gap"])
        result["far"].append({"context": n} | {key: float(s[key].mean()) for key in FAR} | {"heads": s["far_mass"].mean((0, -1)).tolist()})
    data.write_json(run / "theory.json", finite(result))

    print(f"\n{run.name}: {c.pos}, step {saved['step']:,}, trained at {block}; {folder}: {len(ends)} x {QUERIES} queries; far: from {near}")
    show(f"steps (mean r by energy; n_mix of the slowest head, for {TOLERANCE} nats; energy unmixed after {block})", result["steps"],
         {"layer": "", "least r": ".3f", "mean r": ".3f", "most r": ".3f", "lam": ".2f", "n_mix": ",", "unmixed": ".2f"})
    show("coherence of phases n steps apart", result["decoherence"], {"n": ",", "text": ".3f", "r^n": ".3f", "shuffled": ".3f"})
    show("logits by distance", [x for x in result["logits"] if x["context"] in (block, args.length)],
         {"context": ",", "from": ",", "below": ","} | dict.fromkeys(("mean", "std", "max", "logmeanexp"), ".2f"))
    show(f"far mass (predicted: gap of {block}; bounds mean_far, worst_case), far output (coherence |sum a v|/sum a|v|, expected, floor)",
         result["far"], {"context": ","} | FAR)
    return result


def plot(results, path):
    """Four panels, a colour per run: decoherence, logits by distance at the longest context, far mass, coherence of the far output."""
    plt = pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    panels = (("coherence of phases", "decoherence", "n", ("text", "r^n", "shuffled")),
              ("logits (far below -10 under a bias)", "logits", "from", ("logmeanexp", "mean")),
              ("far mass", "far", "context", ("far_mass", "predicted", "mean_far")),
              ("far output", "far", "context", ("coherence", "expected", "n_eff^-.5")))
    for ax, (title, key, x, names) in zip(axes.flat, panels):
        for i, result in enumerate(results):
            rows = [row for row in result[key] if key != "logits" or row["context"] == result["far"][-1]["context"]]
            for name, style in zip(names, ("-", "--", ":")):
                ax.semilogx([max(row[x], 0.5) for row in rows], [row[name] for row in rows], style, base=2, color=f"C{i}",
                            label=result["run"] if style == "-" else None)
        ax.set(xlabel={"n": "steps apart", "from": "distance", "context": "context length"}[x] + " (tokens)",
               title=title + ": " + ", ".join(map("{} ({})".format, names, ("solid", "dashed", "dotted"))))
        if key == "logits":
            ax.set_ylim(-10, 1 + max(row["logmeanexp"] for result in results for row in result[key]))
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders with a ckpt.pt to measure (default: check the statements)")
    parser.add_argument("--seed", type=int, default=0, help="of the Monte Carlo checks")
    parser.add_argument("--length", type=int, default=65536, help="longest context to measure (default 65,536)")
    parser.add_argument("--windows", type=int, default=4, help="stretches of validation text to measure (default 4)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", action="store_true", help="draw out/theory.png (needs matplotlib)")
    args = parser.parse_args(argv)
    if not args.runs:
        rows = [check(*claim) for claim in claims(args.seed)]
        show(f"seed {args.seed}; !: what does not follow", [row | {"holds": "yes" if row["holds"] else "NO"} for row in rows],
             {"section": "", "formula": ".5g", "": "", "simulated": ".5g", "+-": ".1g", "holds": "", "claim": ""})
        print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold")
        raise SystemExit(not all(row["holds"] for row in rows))
    try:
        if args.plot:
            pyplot()                                                         # before the work, not after it
        runs = [Path(run) for run in args.runs]
        check_runs(runs)
        results = [measure(run, args) for run in runs]
        if args.plot:
            Path("out").mkdir(exist_ok=True)
            plot(results, "out/theory.png")
            print("\nout/theory.png")
    except (ValueError, OSError) as e:
        data.die(e)


if __name__ == "__main__":
    main()
