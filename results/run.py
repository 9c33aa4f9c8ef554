"""The runs behind README.md, made again by one line a table, from the folder that holds out/ and data/.

    python results/run.py debian    makes the corpus, trains and evaluates its runs -> results/RUN.json
    python results/run.py tiny      the same for the quick start's runs, on bytes
    python results/run.py theory    measures some of those with theory.py -> results/theory-RUN.json
    python results/run.py tables    writes results/README.md, README.md's tables and the figures

Stop and call it again: a finished training in out/RUN is evaluated only, an unfinished one goes on, what is
evaluated is skipped. Tables have the runs that are there. The corpus needs Debian 12 (apt, dpkg).
"""
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data
from eval_extrapolate import cell, mean_and_error, plot, save_figure
from model import load_model
from theory import plot as theory_plot
from train import parse_args

CORPUS = ROOT / "results" / "corpus.json"
PACKAGES = ["linux-doc-6.1=6.1.192-3", "python3.11-doc=3.11.2-6+deb12u9"]
SNAPSHOT = "https://snapshot.debian.org/archive/debian-security/20261130T000000Z"
# glibc gives the memory of a step back and fetches it again: 18 % of a step, with a vocabulary of 8,192
MALLOC = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2 ** 33))


class Run(NamedTuple):
    """What is trained in out/FOLDER and evaluated into results/NAME.json: one seed of a row of a table."""
    row: str
    name: str
    folder: str
    train: str
    evaluate: str


SETTINGS = {    # table -> flags of training and of evaluation
    "debian": ("--preset tiny --data debian --compile",
               "--lengths 256,1024,4096,16384,32768 --stretches 12 --dtype bfloat16"),
    "256x": ("", "--lengths 256,65536 --stretches 6 --dtype bfloat16"),
    "copy": ("", "--lengths 128,256,1024,4096,16384,32768 --stretches 4 --dtype bfloat16 --copy"),
    "ablation": ("--preset tiny --data debian --max_iters 400 --compile",
                 "--lengths 256,4096,16384 --stretches 6 --dtype bfloat16"),
    "deep": ("--preset tiny --data debian --n_layer 16 --compile",
             "--lengths 256,4096,16384 --stretches 6 --dtype bfloat16"),
    "tiny": ("--preset tiny", "--lengths 256,...,16384 --stretches 12"),
}


def runs(table, schemes, seeds=(1,), also="", **options):
    """The runs of some schemes, with options of train.py, and with further flags of the evaluation."""
    trained = table if SETTINGS[table][0] else "debian"
    variant = "".join(f"-{name}{value}" for name, value in options.items())
    given = "".join(f" --{name} {value}".rstrip() for name, value in options.items())
    for pos in schemes.split():
        for seed in seeds:
            suffix = f"-seed{seed}" * (seed > 1)
            folder = f"{trained}-{pos}{variant}{suffix}"
            flags = SETTINGS[trained][0] + given + f" --seed {seed}" * (seed > 1)
            row = pos + "+logn" * ("--logn" in also) + variant
            yield Run(row, f"{table}-{row}{suffix}", folder,
                      f"train.py --pos {pos} {flags} --out_dir out/{folder}",
                      f"eval_extrapolate.py out/{folder} {SETTINGS[table][1]}{also}")


TABLES = {
    "debian": [
        *runs("debian", "nope rope random_qk random_qkv accum_qk accum_qkv alibi", (1, 2, 3)),
        *runs("debian", "random_qk random_qkv random_qk_v", (1, 2, 3), out_norm=""),
        *runs("debian", "path", (1, 2, 3)),
        *runs("debian", "rope_qkv random_qk_v hidden_qk hidden_qkv householder_qk householder_qkv"),
        *runs("debian", "fox rope+alibi path+fox", (1, 2, 3)),
        *runs("debian", "accum_qkv+alibi"),
        *runs("debian", "random_qkv+ssmax path+ssmax"),
        *runs("debian", "random_qk_v+ssmax", out_norm=""),
        *runs("debian", "rope random_qk random_qkv path", (1, 2, 3), also=" --logn"),
        *runs("debian", "random_qk random_qkv random_qk_v", out_norm="", also=" --logn"),
        *runs("debian", "random_qk random_qkv", max_iters=4800),
        *runs("debian", "random_qk random_qkv", (1, 2, 3), sigma=10),
    ],
    "256x": [
        *runs("256x", "alibi", (3,)),
        *runs("256x", "random_qk_v", (3,), out_norm=""),
        *runs("256x", "random_qkv path", (3,), also=" --logn"),
    ],
    "copy": [
        *runs("copy", "rope random_qkv path alibi fox accum_qkv+alibi path+fox"),
        *runs("copy", "random_qkv", also=" --logn"),
        *runs("copy", "path", (1, 2, 3), also=" --logn"),
    ],
    "ablation": [
        # sigma 10: uniform angles
        *(run for sigma in (0.03, 0.1, 0.3, 1, 10) for run in runs("ablation", "random_qk", sigma=sigma)),
        *(run for sigma in (1, 10) for run in runs("ablation", "random_qkv", sigma=sigma)),
        *runs("ablation", "random_qkv fresh_qk"),
        *(run for n_head in (1, 4) for run in runs("ablation", "random_qk random_qkv", n_head=n_head)),
        *(run for n_layer in (2, 8) for run in runs("ablation", "random_qk", n_layer=n_layer)),
        *runs("ablation", "random_qkv", n_layer=8),
        *runs("ablation", "random_qk", qk_norm=""),
        *(run for scale in (1, 0.25, 0.0625, 0.015625)
          for run in runs("ablation", "alibi rope+alibi random_qkv+alibi", alibi_scale=scale)),
    ],
    "deep": [
        *runs("deep", "random_qk random_qkv", (1, 2, 3)),
        *runs("deep", "random_qk random_qkv", (1, 2, 3), sigma=10),
    ],
    "tiny": [
        *runs("tiny", "nope rope random_qk random_qkv accum_qk accum_qkv path"),
        *runs("tiny", "alibi rope+alibi accum_qkv+alibi"),
    ],
}
MEASURED = ["debian-" + row for row in (      # runs of the first table that theory.py reads
    "rope random_qk random_qkv alibi random_qkv-out_norm random_qk_v-out_norm path-seed3 "
    "random_qkv+logn path+logn-seed3 random_qk_v+logn-out_norm").split()]
MEASUREMENT = "--length 16384 --stretches 2 --causes 8192"


# -----------------------------------------------------------------------------------------------------------
# Making

def call(command):
    """Run one of the project's scripts. Raises ValueError if it fails."""
    print(f"\n$ python {command}", flush=True)
    script, *flags = command.split()
    with subprocess.Popen([sys.executable, str(ROOT / script), *flags], env=MALLOC | os.environ) as process:
        try:
            status = process.wait()
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit):                 # SIGTERM came here alone, Ctrl-C to both
                process.terminate()
            process.wait()                                   # it saves
            raise
    if status:
        raise ValueError(f"python {command} ended with status {status}")


def cpu():
    """The processor's name, where Linux tells."""
    info = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", info.read_text() if info.exists() else "")
    return names[0] if names else platform.machine()


def debian_documents(top):
    """The sources of the packages' pages, unpacked in `top`: English only, runs of blanks made one."""
    # python3.11-doc holds a link to its own pages
    pages = {path.resolve() for path in top.glob("usr/share/doc/*/html/_sources/**/*.txt")}
    for path in sorted(pages):
        name = path.relative_to(top.resolve() / "usr/share/doc").as_posix()
        if "translations" not in name:
            yield name, re.sub(rb"[ \t]+", b" ", path.read_bytes())


def make_debian():
    """Make data/debian: the documentation of Linux and of Python, in GPT-2's BPE cut to 8,192 ids."""
    unpack = f"apt-get download {' '.join(PACKAGES)} && for f in *.deb; do dpkg-deb -x $f . || exit 1; done"
    with tempfile.TemporaryDirectory() as top:
        if subprocess.run(["sh", "-c", unpack], cwd=top).returncode:
            raise ValueError(f"the corpus needs apt, a network, and {' and '.join(PACKAGES)}: where apt has "
                             f"others, add {SNAPSHOT} bookworm-security main to its sources")
        data.prepare(debian_documents(Path(top)), Path("data/debian"), ", ".join(PACKAGES), "gpt2:8192")


def token_statistics(tokens, encoding):
    """How tokens (N,) of a text come: what decides how soon sums of their angles mix."""
    counts = np.bincount(tokens)
    sizes = [len(encoding.decode_single_token_bytes(i)) for i in range(len(counts))]
    return {
        "encoding": encoding.name,
        "tokens": len(tokens),
        "bytes_per_token": counts @ sizes / len(tokens),
        "sum_p2": ((counts / len(tokens)) ** 2).sum(),
        "repeats": (tokens[1:] == tokens[:-1]).mean(),
    }


def check_corpus():
    """Write results/corpus.json, in two encodings, or raise ValueError if data/debian is another text."""
    files = {"train": digest(Path("data/debian/train.bin")), "val": digest(Path("data/debian/val.bin"))}
    if CORPUS.exists():
        if json.loads(CORPUS.read_text())["files"] != files:
            raise ValueError(f"data/debian is not the text of {CORPUS}: move that and results/debian-* away")
        return
    name = json.loads(Path("data/debian/meta.json").read_text())["encoding"]
    own, whole = data.encoding(name), data.encoding("gpt2")
    tokens = data.load("data/debian", "val", 1)
    again = whole.encode(own.decode(tokens.tolist()), allowed_special="all")
    rows = [token_statistics(tokens, own), token_statistics(np.array(again), whole)]
    data.write_json(CORPUS, {"packages": PACKAGES, "files": files, "encodings": rows})


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_result(name, commands, ckpt, written):
    """What the last command writes beside a checkpoint -> results/NAME.json, with what made it, unless it is
    there already. Raises ValueError if the checkpoint changes meanwhile."""
    path, checkpoint = ROOT / "results" / f"{name}.json", digest(ckpt)
    result = json.loads(path.read_text()) if path.exists() else {}
    if (result.get("commands"), result.get("checkpoint")) == (commands, checkpoint):
        print(f"{name} is finished")
        return

    call(commands[-1])
    if digest(ckpt) != checkpoint:
        raise ValueError(f"{ckpt} was written to while it was read: call run.py again, once")
    made = {"run": name.removeprefix("theory-"), "commands": commands, "checkpoint": checkpoint, "cpu": cpu()}
    data.write_json(path, json.loads((ckpt.parent / written).read_text()) | made)


def check_flags(run, saved):
    """Raise ValueError if a checkpoint was trained with other flags than its row of the table has."""
    preset, given, _ = parse_args(run.train.split()[1:])
    found = saved["train_config"] | saved["model_config"] | {"out_dir": given["out_dir"]}
    others = [name for name, value in (preset | given).items() if found.get(name, value) != value]
    if others:
        raise ValueError(f"out/{run.folder} was trained with another {', '.join(others)}: move it away")


def make(table):
    """Train and evaluate every run of a table that is not finished, one after the other."""
    if "--data debian" in TABLES[table][0].train:
        if not Path("data/debian").exists():
            make_debian()
        check_corpus()
    for run in TABLES[table]:
        ckpt = Path("out", run.folder, "ckpt.pt")
        if not ckpt.exists():
            call(run.train)
        saved = load_model(ckpt)[1]
        check_flags(run, saved)
        if saved["iter_num"] < saved["train_config"]["max_iters"]:
            call(f"{run.train} --resume")
        make_result(run.name, [run.train, run.evaluate], ckpt, "extrapolate.json")


def measure():
    """The quantities of the theory on some trained models, those of them that are there."""
    for run in TABLES["debian"]:
        ckpt = Path("out", run.folder, "ckpt.pt")
        if run.name in MEASURED and ckpt.exists():
            scaled = " --logn" * run.evaluate.endswith("--logn")
            command = f"theory.py out/{run.folder}{scaled} {MEASUREMENT}"
            make_result(f"theory-{run.name}", [command], ckpt, "theory.json")


# -----------------------------------------------------------------------------------------------------------
# Showing

def load(table):
    """Results by row, a list over seeds 1, 2, ..., as far as runs are there: rows are paired seed by seed.

    Raises ValueError where they cannot be compared, or were made by other commands.
    """
    rows, first, ended = {}, None, set()
    for run in TABLES[table]:
        path = ROOT / "results" / f"{run.name}.json"
        if run.row in ended or not path.exists():
            ended.add(run.row)
            continue
        result = json.loads(path.read_text())
        first = first or result
        for key in ("text", "unit", "train_context"):
            if key not in result or result[key] != first[key]:
                raise ValueError(f"{path} differs in {key}: make it again, run.py {table}")
        if result.get("commands") != [run.train, run.evaluate]:
            raise ValueError(f"{path} differs in its commands: make it again, run.py {table}")
        rows.setdefault(run.row, []).append(result)
    return rows


def any_run(rows):
    """A result of a table: what `load` checks is the same in all of them."""
    return next(iter(rows.values()))[0]


def losses(results, protocol, context):
    """Loss of every stretch in nats: (seeds, stretches)."""
    found = []
    for result in results:
        for row in result["rows"]:
            if (row["protocol"], row["context"]) == (protocol, context):
                found.append(row["stretch_nll"])
    return np.array(found, dtype=np.float64)                # null: not a number


def change(results, protocol, context):
    """Loss at a context minus that at the training context: the log of the ratio, (seeds, stretches)."""
    base = results[0]["train_context"]
    return losses(results, protocol, context) - losses(results, protocol, base)


def paired(of, one, other, protocol, context):
    """of(results, protocol, context), one row minus another, for the seeds that both have."""
    n = min(len(one), len(other))
    return of(one[:n], protocol, context) - of(other[:n], protocol, context)


def averaged(name, results):
    """What `plot` draws of a row of the table: one result, with ratios over all seeds."""
    rows = []
    for context in contexts(results[0]):
        mean = change(results, "last", context).mean()
        drawn = float(np.exp(mean)) if np.isfinite(mean) else None
        rows.append({"protocol": "last", "context": context, "ratio": drawn})
    return results[0] | {"run": name, "rows": rows}


def ratio(results, protocol, context):
    """Perplexity over that at the training context, as a table shows it."""
    mean, error = mean_and_error(change(results, protocol, context))
    return cell(np.exp(mean) if np.isfinite(mean) else None, np.exp(mean) * error, digits=2)


def markdown(titles, rows):
    """A table, or nothing where it has no rows."""
    if not rows:
        return ""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def ratio_table(results, columns):
    """Perplexity at the training context, then ratios to it. columns: (protocol, context) each."""
    first = any_run(results)
    base = first["train_context"]
    rows = []
    for name, seeds in results.items():
        perplexity = np.exp(losses(seeds, columns[0][0], base).mean())
        cells = [ratio(seeds, protocol, context) for protocol, context in columns]
        rows.append([f"`{name}`", f"{len(seeds)}", cell(perplexity, digits=2), *cells])
    titles = [f"`{protocol}` {context:,}" for protocol, context in columns]
    return markdown(["scheme", "seeds", f"perplexity {first['unit']} at {base:,}", *titles], rows)


DIFFERENCES = ("_qkv|_qk_v", "_qk"), ("rope_qkv", "rope"), ("-out_norm", ""), (r"\+(logn|ssmax)", "")


def difference_table(results):
    """What one thing more does to a scheme: carried values, the norm, a scale. Loss by `last`, paired."""
    first = any_run(results)
    rows = []
    for more, less in DIFFERENCES:
        for name, one in results.items():
            other_name = re.sub(more, less, name)
            if other_name == name or other_name not in results:
                continue
            cells = []
            for context in contexts(first):
                found = paired(losses, one, results[other_name], "last", context)
                cells.append("{:+.3f} ± {:.3f}".format(*mean_and_error(found)))
            rows.append([f"`{name}`", f"`{other_name}`", f"{len(found)}", *cells])
    return markdown(["scheme", "minus", "seeds", *(f"{context:,}" for context in contexts(first))], rows)


def short(name):
    """A run's name without that of its table."""
    return name.split("-", 1)[1]


def contexts(result):
    return [row["context"] for row in result["rows"] if row["protocol"] == "last"]


def copy_table(results):
    """Perplexity of a passage that stands in the text a second time, over that without the first copy."""
    rows, distances = [], []
    for name, seeds in results.items():
        for seed, result in enumerate(seeds, 1):
            copies = [row for row in result["rows"] if row["protocol"] == "copy"]
            distances = [row["context"] + 1 - result["train_context"] // 4 for row in copies]
            ratios = [cell(row["ratio"], row["ratio_stderr"], digits=2) for row in copies]
            rows.append([f"`{name}`" + f", seed {seed}" * (len(seeds) > 1), *ratios])
    return markdown(["scheme", *(f"{distance:,}" for distance in distances)], rows)


def theory_table(results):
    """Far mass at the training context and at the longest one, its prediction, and coherence."""
    titles = ["run", "far mass at first", "at the longest", "predicted", "Δ_eff", "coherence",
              "expected coherence", "angle of output and near part", "expected angle"]
    rows = []
    for result in results:
        first, last = result["far"][0], result["far"][-1]
        rows.append([
            f"`{short(result['run'])}`",
            f"{first['far_mass']:.3f}",
            f"{last['far_mass']:.3f}",
            f"{last['predicted']:.3f}",
            f"{first['gap']:.1f} → {last['gap']:.1f}",
            f"{first['coherence']:.2f} → {last['coherence']:.2f}",
            f"{last['expected']:.2f}",
            f"{last['angle']:.2f}",
            f"{last['exp_angle']:.2f}",
        ])
    return markdown(titles, rows)


def corpus_lines(corpus):
    """How tokens come, in two encodings of the same text."""
    lines = []
    for row in corpus["encodings"]:
        lines.append(f"- in `{row['encoding']}` {row['bytes_per_token']:.2f} bytes a token, "
                     f"{row['repeats']:.1%} repeats, sum of squared frequencies {row['sum_p2']:.4f}")
    return "\n".join(lines)


def causes_table(results):
    """Loss where attention reads its near or far part only, or the near part whole."""
    titles = list(results[0]["causes"])
    rows = []
    for result in results:
        context, *causes = result["causes"].values()
        rows.append([f"`{short(result['run'])}`", f"{context:,}", *(f"{loss:.2f}" for loss in causes)])
    return markdown(["run", *titles], rows)


def speed_tables(costs):
    """What results/speed.json says, for results/README.md; it may lack a part."""
    made = next(iter(costs.values()))
    parts = [f"## speed\n\nMade by `python results/speed.py` {', '.join(f'`{name}`' for name in costs)}: "
             f"{made['clock']}, on {made['machine']}."]
    for name in ("steps", "large"):
        if name not in costs:
            continue
        over = [key for key in ("over_plain", "over_default") if costs[name]["rows"][0][key] is not None]
        rows = []
        for row in costs[name]["rows"]:
            compiled = "yes" if row["compiled"] else "no"
            rows.append([f"`{row['model']}`", row["dtype"], compiled, *(f"{row[key]:.2f}" for key in over)])
        shape = f"{costs[name]['n_layer']} x {costs[name]['n_embd']}"
        default = ", and over those of its default, float32 and not compiled" * ("over_default" in over)
        parts.append(f"Training at {shape}: tokens per second over those of a plain GPT of the same dtype, "
                     f"compiled like it (`plain`; `alone`: its matmuls and SDPA){default}.")
        parts.append(markdown(["model", "dtype", "compiled", *(key.replace("_", " ") for key in over)], rows))

    if "forward" in costs:
        rows = []
        for row in costs["forward"]["rows"]:
            rows.append([f"{row['context']:,}", f"`{row['model']}`", f"{row['over_alone']:.2f}"])
        parts.append("One layer's forward pass: time over that of its matmuls and SDPA.")
        parts.append(markdown(["context", "model", "over alone"], rows))
    return "\n\n".join(parts) + "\n"


PAPER = [   # scheme, multiple of the training context, ratio of perplexity per token of GPT-2's BPE
    ("rope", 16, 16.2), ("random_qk", 16, 1.60), ("random_qk", 128, 7.49), ("random_qkv", 128, 1.59),
    ("alibi", 128, 0.96),
]
PAPER_BYTES = 4.5           # a token of GPT-2's BPE on web text, about


def paper_table(results, bytes_per_token):
    """The paper's ratios beside ours by its protocol, `window`, per token and per byte."""
    rows = []
    for name, times, paper in PAPER:
        if name not in results:
            continue
        seeds = results[name]
        here = np.exp(change(seeds, "window", times * seeds[0]["train_context"]).mean())
        by_byte = paper ** (1 / PAPER_BYTES), here ** (1 / bytes_per_token)
        rows.append([f"`{name}`", f"{times}x", *(f"{number:.2f}" for number in (paper, here, *by_byte))])
    return markdown(["scheme", "context", "paper, per token", "here", "paper, per byte", "here"], rows)


# rows of the first table that README.md shows; results/README.md has all
SHOWN = ("nope rope random_qk random_qkv accum_qk accum_qkv alibi random_qkv-out_norm random_qk_v-out_norm "
         "path fox rope+alibi path+fox accum_qkv+alibi random_qkv+logn path+logn").split()
FIGURE = ("rope path random_qk random_qkv random_qk_v-out_norm random_qkv+logn path+logn "
          "alibi path+fox").split()
# what is compared; of two rows of the first table, or of the deep one; at which multiple of the training
# context; by perplexity, or by its ratio to that at the training context
FINDINGS = [
    ("Random rotations by token against RoPE", "random_qk", "rope", 16, change),
    ("A distance bias against rotations alone", "alibi", "random_qk", 128, change),
    ("Carrying values", "random_qkv", "random_qk", 128, change),
    ("Carrying values, uniform angles", "random_qkv-sigma10", "random_qk-sigma10", 128, change),
    ("Carrying values, 16 layers", "deep-random_qkv", "deep-random_qk", 64, change),
    ("Carrying values, with a norm", "random_qkv-out_norm", "random_qk-out_norm", 128, change),
    ("Separate angles for values, with that norm",
     "random_qk_v-out_norm", "random_qkv-out_norm", 128, change),
    ("Logits that grow with ln i", "random_qkv+logn", "random_qkv", 128, change),
    ("PaTH with such logits against ALiBi, in perplexity", "path+logn", "alibi", 128, losses),
    ("Adding PaTH to FoX, in perplexity", "path+fox", "fox", 128, losses),
]
MORE_FINDINGS = [                                           # for results/README.md
    ("Random rotations against no positions, in perplexity", "random_qk", "nope", 128, losses),
    ("Carrying values, 16 layers, uniform angles",
     "deep-random_qkv-sigma10", "deep-random_qk-sigma10", 64, change),
    ("The cost of the norm, in perplexity", "random_qkv-out_norm", "random_qkv", 1, losses),
    ("Logits that grow with ln i, for PaTH", "path+logn", "path", 128, change),
    ("The same for RoPE, whose score gap is gone", "rope+logn", "rope", 128, change),
    ("PaTH with such logits against ALiBi", "path+logn", "alibi", 128, change),
    ("Adding RoPE to ALiBi, in perplexity", "rope+alibi", "alibi", 128, losses),
]


def findings(results, compared):
    """A row for each of the findings to be `compared` whose runs are there; bold where all seeds agree."""
    rows = []
    for text, name, other_name, times, of in compared:
        one, other = results.get(name), results.get(other_name)
        if not one or not other:
            continue
        cells = []
        for protocol in ("last", "window"):
            found = paired(of, one, other, protocol, times * one[0]["train_context"])
            n, (mean, error) = len(found), mean_and_error(found)
            agree = n > 1 and abs(np.sign(found.mean(1)).sum()) == n
            cells.append(f"**{mean:+.2f}** ± {error:.2f}" if agree else f"{mean:+.2f} ± {error:.2f}")
        rows.append([text, f"`{name}`", f"`{other_name}`", f"{times}x", f"{n}", *cells])
    return markdown(["what", "first", "second", "context", "seeds", "`last`", "`window`"], rows)


def section(table, results):
    """One table's part of results/README.md."""
    first = any_run(results)
    longer = [context for context in contexts(first) if context != first["train_context"]]
    cpus = " and on ".join(sorted({result["cpu"] for seeds in results.values() for result in seeds}))
    parts = [f"""## {table}

Trained for {first['iter_num']:,} iters; evaluated on {first['stretches']} stretches of {first['longest']:,}
tokens of {first['data']}, on {cpus}, {first['device']}.
Made by `python results/run.py {table}`; the first run:

    python {first['commands'][0]}
    python {first['commands'][1]}
"""]
    if table == "copy":
        parts += ["A passage that stands in the text twice, so many tokens apart: perplexity of the second\n"
                  "copy over that of the same tokens without the first one.\n", copy_table(results)]
    else:
        parts += [
            "`last`, the same target tokens at every length:\n",
            ratio_table(results, [("last", context) for context in longer]),
            "\n`window`, all tokens of the stretches:\n",
            ratio_table(results, [("window", context) for context in longer]),
        ]
        differences = difference_table(results)
        if differences:
            parts.append("\nLoss by `last` of one scheme minus that of another, in nats, paired by stretch "
                         f"and seed:\n\n{differences}")
    return "\n".join(parts) + "\n"


def between_marks(readme, table, text):
    """README.md with this text between the marks of a table."""
    mark, end = f"<!-- table: {table} -->\n", "<!-- end -->"
    readme, found = re.subn(f"{mark}.*?{end}", lambda _: f"{mark}{text}\n{end}", readme, flags=re.DOTALL)
    if found != 1:
        raise ValueError(f"README.md needs {mark.strip()} once, with {end} after it")
    return readme


def tables():
    """Write everything that shows numbers: results/README.md, README.md between its marks, the figures."""
    results = {table: load(table) for table in TABLES}
    paths = [ROOT / "results" / f"theory-{name}.json" for name in MEASURED]
    measured = [json.loads(path.read_text()) for path in paths if path.exists()]
    main_table = results["debian"]
    corpus = json.loads(CORPUS.read_text()) if CORPUS.exists() else {}
    if not main_table or not measured or not corpus:
        raise ValueError("no results to show: make some with run.py debian, and then with run.py theory")
    first = any_run(main_table)
    base, longest = first["train_context"], first["longest"]
    columns = [("last", 16 * base), ("last", longest), ("window", longest)]
    compared = main_table | {f"deep-{row}": deep for row, deep in results["deep"].items()}
    shown = {
        "debian": ratio_table({row: main_table[row] for row in SHOWN if row in main_table}, columns),
        "findings": findings(compared, FINDINGS),
        "paper": paper_table(main_table, corpus["encodings"][0]["bytes_per_token"]),
    }
    readme = (ROOT / "README.md").read_text()
    for mark, text in shown.items():
        readme = between_marks(readme, mark, text)

    parts = ["""# Results

Written by `python results/run.py tables`. A ratio is the perplexity over that at the training context, a mean
over seeds, ± one standard error over stretches of text and, where there are several, over seeds.
"""]
    parts += [section(table, rows) for table, rows in results.items() if rows]
    parts.append(f"""## findings

The log of the first one's ratio minus that of the second, paired; or of their perplexities. Bold: all seeds
agree on the sign.

{findings(compared, FINDINGS + MORE_FINDINGS)}

## corpus

Frequent tokens and immediate repeats slow the mixing of accumulated steps. In the held-out text of `debian`
there are

{corpus_lines(corpus)}

## theory

    python {measured[0]['commands'][0]}

{theory_table(measured)}

## causes

Loss in nats of the last tokens of the context if attention, in all layers, has its far part zeroed, its near
part made whole (divided by one minus the far mass), or both.

{causes_table(measured)}
""")
    costs = ROOT / "results" / "speed.json"
    if costs.exists():
        parts.append(speed_tables(json.loads(costs.read_text())))
    labelled = [averaged(name, main_table[name]) for name in FIGURE if name in main_table]
    save_figure(plot(labelled or [first]), ROOT / "assets" / "extrapolation.png")
    labelled = [result | {"run": short(result["run"])} for result in measured if "+logn" not in result["run"]]
    save_figure(theory_plot(labelled), ROOT / "assets" / "theory.png")
    for path, text in (("results/README.md", "\n".join(parts)), ("README.md", readme)):
        with data.written_whole(ROOT / path) as file:
            file.write(text)


def main(what="", *more):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with data.one_line_errors():
        if what == "tables" and not more:
            tables()
        elif what == "theory" and not more:
            measure()
        elif what in TABLES and not more:
            make(what)
        else:
            raise ValueError(f"usage: run.py {'|'.join(TABLES)}|theory|tables")


if __name__ == "__main__":
    main(*sys.argv[1:])
