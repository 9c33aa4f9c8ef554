"""The runs behind README.md, made again by one line a table.

    python results/run.py tiny [--threads N]   trains and evaluates the table's runs, into results/RUN.json
    python results/run.py tables               writes results/README.md, README.md's table and the figure

What is finished is skipped, an unfinished training goes on; what the scripts print is in out/RUN.txt.
"""
import argparse
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
README = ROOT / "README.md"
FIGURE = ROOT / "assets" / "extrapolation.png"
sys.path.insert(0, str(ROOT))

import data
from eval_extrapolate import NO_ROW, by_context, mean_and_error, plot, show

SCHEMES = """nope rope random_qk random_qkv accum_qk accum_qkv path householder_qk householder_qkv alibi fox
             rope+alibi random_qkv+alibi accum_qkv+alibi hidden_qkv+alibi accum_qkv+fox path+fox""".split()

# table -> its runs (preset, scheme, seed, further flags of train.py), and the flags of eval_extrapolate.py
TABLES = {
    "tiny": ([("tiny", pos, 1, "") for pos in SCHEMES], "--lengths 256,...,65536 --stretches 12"),
}


# ------------------------------------------------------------------------------------------------------------
# Runs

def name_of(preset, pos, seed, flags):
    seed = f"-seed{seed}" if seed != 1 else ""
    return f"{preset}-{pos}{seed}" + re.sub(r"\W+", "-", flags)              # "--n_head 4" -> "-n_head-4"


def commands(run, eval_flags):
    """The two command lines of a run."""
    preset, pos, seed, flags = run
    train = f"train.py --preset {preset} --pos {pos} --seed {seed} --out_dir out/{name_of(*run)} {flags}"
    return [train.strip(), f"eval_extrapolate.py out/{name_of(*run)} {eval_flags}"]


def call(command, log, threads):
    """Run one of the project's scripts; what it prints goes to `log`. Raises ValueError if it fails."""
    script, *flags = command.split()
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("a") as f:
        print(f"\n$ python {command}", file=f, flush=True)
        arguments = [sys.executable, str(ROOT / script), *flags]
        status = subprocess.run(arguments, stdout=f, stderr=f, env=environment).returncode
    if status:
        raise ValueError(f"python {command} ended with status {status}; see {log}")


def cpu():
    """The processor's name."""
    try:
        return re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def read(path):
    """A result, {} where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def finished(run, eval_flags):
    """Is results/RUN.json of the run's checkpoint as it is now, and of these commands?"""
    ckpt, result = Path("out", name_of(*run), "ckpt.pt"), read(RESULTS / f"{name_of(*run)}.json")
    if not ckpt.exists() or result.get("commands") != commands(run, eval_flags):
        return False
    return result["checkpoint"] == hashlib.sha256(np.memmap(ckpt, mode="r")).hexdigest()


def make(table, threads):
    """Train and evaluate every run of a table that is not finished, one after the other."""
    runs, eval_flags = TABLES[table]
    todo = [run for run in runs if not finished(run, eval_flags)]
    print(f"{table}: {len(runs) - len(todo)} of {len(runs)} runs are finished")
    Path("out").mkdir(exist_ok=True)
    for run in todo:
        name, start = name_of(*run), time.time()
        folder, log = Path("out", name), Path("out", f"{name}.txt")
        train, evaluate = commands(run, eval_flags)
        print(f"{name}, printing to {log}", end=" ", flush=True)
        resume = " --resume" if (folder / "ckpt.pt").exists() else ""
        call(train + resume, log, threads)
        call(evaluate, log, threads)
        result = read(folder / "extrapolate.json") | {"commands": [train, evaluate], "cpu": cpu()}
        data.write_json(RESULTS / f"{name}.json", result)
        print(data.clock(time.time() - start))


# ------------------------------------------------------------------------------------------------------------
# Tables

def load(table):
    """A table's results, in its order. Raises ValueError where they are not of one text, unit and context."""
    names = [name_of(*run) for run in TABLES[table][0]]
    found = {name: read(RESULTS / f"{name}.json") for name in names}
    missing = [name for name in names if "commands" not in found[name]]
    if missing:
        print(f"{table}: not there yet: {', '.join(missing)}", file=sys.stderr)
    results = [found[name] for name in names if name not in missing]
    for key in ("text", "unit", "train_context"):
        if len({result[key] for result in results}) > 1:
            raise ValueError(f"{table}: the runs differ in {key} and cannot share a table; make them again")
    return results


def paired(one, other, protocol, context, base=None):
    """Loss of `one` minus loss of `other` (nats): mean over the stretches and its standard error.

    base: less the same at this context, which makes it the logarithm of the ratios' ratio.
    Raises ValueError if the runs have not scored the same tokens.
    """
    if (one["text"], one["train_context"]) != (other["text"], other["train_context"]):
        raise ValueError(f"{one['run']} and {other['run']} have not scored the same tokens")

    def losses(result):
        rows = by_context(result, protocol)
        nll = np.array(rows[context]["stretch_nll"], dtype=np.float64)       # null -> not-a-number
        return nll - np.array(rows[base]["stretch_nll"], dtype=np.float64) if base else nll
    return mean_and_error(losses(one) - losses(other))


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def title(result):
    """A run's name without its preset."""
    return f"`{result['run'].split('-', 1)[1]}`"


def ratio_table(results, columns):
    """Perplexity at the training context, then ratios to it. columns: (title, protocol, context) each."""
    base = results[0]["train_context"]
    rows = []
    for result in results:
        cells = [title(result), show(by_context(result, columns[0][1])[base], "nll", 2)]
        for _, protocol, context in columns:
            row = by_context(result, protocol).get(context, NO_ROW)
            cells.append(show(row, "log_ratio", 2))
        rows.append(cells)
    titles = [column[0] for column in columns]
    return markdown(["scheme", f"perplexity {results[0]['unit']} at {base:,}", *titles], rows)


def short_table(results):
    """README.md's: `last` at 4, 16, 64 and 256 times the training context, and `window` at 256 times."""
    base = results[0]["train_context"]
    columns = [(f"{base * n:,} ({n}x)", "last", base * n) for n in (4, 16, 64, 256)]
    return ratio_table(results, [*columns, (f"`window` {base * 256:,}", "window", base * 256)])


def long_table(results, protocol):
    lengths = sorted({row["context"] for result in results for row in result["rows"] if row["tokens"]})
    lengths.remove(results[0]["train_context"])
    return ratio_table(results, [(f"{length:,}", protocol, length) for length in lengths])


def signed(mean, error):
    return f"{mean:+.3f} ± {error:.3f}" if math.isfinite(mean) else "not finite"


def carried_table(results, protocol):
    """What carrying values does to the same scheme: `_qkv` minus `_qk`, paired."""
    base = results[0]["train_context"]
    scored = [length for length, row in by_context(results[0], protocol).items() if row["tokens"]]
    lengths = [length for length in scored if length > base]
    runs = {result["run"]: result for result in results}
    rows = []
    for name, result in runs.items():
        plain = runs.get(name.replace("_qkv", "_qk"))
        if plain in (None, result):
            continue
        pairs = [paired(result, plain, protocol, base)]
        pairs += [paired(result, plain, protocol, length, base) for length in lengths]
        rows.append([title(result), *(signed(*pair) for pair in pairs)])
    return markdown(["scheme", f"loss at {base:,}", *(f"log ratio at {n:,}" for n in lengths)], rows)


def section(table, results):
    """One table's part of results/README.md."""
    first = results[0]
    longest = max(row["context"] for row in first["rows"] if row["tokens"])
    runs = sorted({f"{result['iter_num']:,} iterations, seed {result['seed']}" for result in results})
    machines = sorted({f"{result['cpu']}, {result['device']}, torch {result['torch']}" for result in results})
    return "\n\n".join([
        f"## {table}",
        f"Trained: {'; '.join(runs)}. Evaluated: {len(first['starts'])} stretches of {longest:,} from the "
        f"{first['val_tokens']:,} validation tokens of {first['data']} ({first['encoding']}), "
        f"in {first['dtype']} on {'; '.join(machines)}. All: `python results/run.py {table}`. The first:",
        "\n".join(f"    python {command}" for command in first["commands"]),
        "`last`, the same target tokens at every length:",
        long_table(results, "last"),
        "`window`, all tokens of the stretches:",
        long_table(results, "window"),
        "Values carried: loss and log ratio by `last` of `_qkv` minus those of `_qk`, in nats:",
        carried_table(results, "last"),
    ])


def tables():
    """Write everything that shows numbers: results/README.md, README.md between its marks, the figure."""
    parts = ["# Results", "Written by `python results/run.py tables`. A ratio is the perplexity over that at "
             "the training context, ± one standard error over the stretches of text, paired."]
    readme = README.read_text()
    for table in TABLES:
        results = load(table)
        if not results:
            continue
        parts.append(section(table, results))
        mark, end = f"<!-- table: {table} -->", "<!-- end -->"
        if mark not in readme:
            print(f"{README.name} has no line {mark}: no table there", file=sys.stderr)
        else:
            before, rest = readme.split(mark, 1)
            readme = f"{before}{mark}\n{short_table(results)}\n{end}{rest.split(end, 1)[1]}"
        if table == "tiny":
            plot([result for result in results if result["seed"] == 1]).savefig(FIGURE)
    README.write_text(readme)
    (RESULTS / "README.md").write_text("\n\n".join(parts) + "\n")


def main(argv=None):
    parser = data.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TABLES, "tables"])
    parser.add_argument("--threads", type=int, help="for PyTorch (default: as many as it takes)")
    args = parser.parse_args(argv)
    try:
        if args.threads is not None and args.threads < 1:
            raise ValueError("--threads must be at least 1")
        if args.what == "tables":
            tables()
        else:
            make(args.what, args.threads)
    except (ValueError, OSError) as error:
        data.die(error)


if __name__ == "__main__":
    main()
