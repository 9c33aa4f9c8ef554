"""The runs behind README.md, made again by one line a table, from the folder that holds out/.

    python results/run.py tiny      trains and evaluates the table's runs, into results/RUN.json
    python results/run.py theory    measures some of them with theory.py, into results/theory-RUN.json
    python results/run.py tables    writes results/README.md, README.md's tables and both figures

A finished training in out/RUN is evaluated only, an unfinished one goes on; what is evaluated is skipped.
"""
import hashlib
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data
from eval_extrapolate import cell, mean_and_error, plot
from model import load_model
from theory import plot as theory_plot

SCHEMES = "nope rope random_qk random_qkv accum_qk accum_qkv path alibi rope+alibi accum_qkv+alibi".split()
MEASURED = ["rope", "random_qk", "random_qkv", "accum_qkv", "alibi", "accum_qkv+alibi"]
MEASUREMENT = "--length 16384 --stretches 2"
# table -> name of each run -> flags of train.py; all are evaluated with the same flags
TABLES = {"tiny": {f"tiny-{pos}": f"--pos {pos} --preset tiny" for pos in SCHEMES}}
EVALUATION = "--lengths 256,...,16384 --stretches 12"


def call(command):
    """Run one of the project's scripts. Raises ValueError if it fails."""
    print(f"\n$ python {command}", flush=True)
    script, *flags = command.split()
    status = subprocess.run([sys.executable, str(ROOT / script), *flags]).returncode
    if status:
        raise ValueError(f"python {command} ended with status {status}")


def cpu():
    """The processor's name, where Linux tells."""
    info = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", info.read_text() if info.exists() else "")
    return names[0] if names else platform.machine()


def make(table):
    """Train and evaluate every run of a table that is not finished, one after the other."""
    for name, flags in TABLES[table].items():
        folder, path = Path("out", name), ROOT / "results" / f"{name}.json"
        ckpt = folder / "ckpt.pt"
        train = f"train.py {flags} --out_dir {folder}"
        evaluate = f"eval_extrapolate.py {folder} {EVALUATION}"
        if not ckpt.exists():
            call(train)
        saved = load_model(ckpt)[1]
        if saved["iter_num"] < saved["train_config"]["max_iters"]:
            call(f"{train} --resume")

        result = json.loads(path.read_text()) if path.exists() else {}
        digest = hashlib.sha256(ckpt.read_bytes()).hexdigest()
        if result.get("commands") == [train, evaluate] and result["checkpoint"] == digest:
            print(f"{name} is finished")
            continue
        call(evaluate)
        result = json.loads((folder / "extrapolate.json").read_text())
        data.write_json(path, result | {"commands": [train, evaluate], "cpu": cpu()})


def measure():
    """The quantities of the theory on some trained models."""
    for pos in MEASURED:
        command = f"theory.py out/tiny-{pos} {MEASUREMENT}"
        call(command)
        result = json.loads(Path("out", f"tiny-{pos}", "theory.json").read_text())
        path = ROOT / "results" / f"theory-tiny-{pos}.json"
        data.write_json(path, result | {"command": command, "cpu": cpu()})


def theory_table(results):
    """Far mass at the training context and at the longest one, its prediction, and coherence."""
    titles = ["scheme", "far mass", "at the longest", "predicted", "Δ_eff", "coherence", "expected"]
    rows = []
    for result in results:
        first, last = result["far"][0], result["far"][-1]
        rows.append([
            f"`{result['pos']}`",
            f"{first['far_mass']:.3f}",
            f"{last['far_mass']:.3f}",
            f"{last['predicted']:.3f}",
            f"{first['gap']:.1f} → {last['gap']:.1f}",
            f"{first['coherence']:.2f} → {last['coherence']:.2f}",
            f"{last['expected']:.2f}",
        ])
    return markdown(titles, rows)


def load(table):
    """A table's results. Raises ValueError where they differ in text, unit or training context."""
    paths = [ROOT / "results" / f"{name}.json" for name in TABLES[table]]
    results = [json.loads(path.read_text()) for path in paths]
    for path, result in zip(paths, results):
        for key in ("text", "unit", "train_context"):
            if key not in result or result[key] != results[0][key]:
                raise ValueError(f"{path} differs in {key}: make it again with python results/run.py {table}")
    return results


def by_context(result, protocol):
    """A result's rows under one protocol, by context length."""
    return {row["context"]: row for row in result["rows"] if row["protocol"] == protocol}


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def ratio_table(results, columns):
    """Perplexity at the training context, then ratios to it. columns: (protocol, context) each."""
    base = results[0]["train_context"]
    rows = []
    for result in results:
        perplexity = by_context(result, columns[0][0])[base]["ppl"]
        cells = [f"`{result['run'].split('-', 1)[1]}`", cell(perplexity, digits=2)]
        for protocol, context in columns:
            row = by_context(result, protocol)[context]
            cells.append(cell(row["ratio"], row["ratio_stderr"], digits=2))
        rows.append(cells)
    titles = [f"`{protocol}` {context:,}" for protocol, context in columns]
    return markdown(["scheme", f"perplexity {results[0]['unit']} at {base:,}", *titles], rows)


def difference(one, other):
    """Loss of one row minus that of another, paired by stretch (nats)."""
    losses = [np.array(row["stretch_nll"], dtype=np.float64) for row in (one, other)]   # null: not a number
    mean, error = mean_and_error(losses[0] - losses[1])
    return f"{mean:+.3f} ± {error:.3f}"


def carried_table(results):
    """What carrying values does to the same scheme: loss by `last` of `_qkv` minus that of `_qk`, paired."""
    runs = {result["run"]: by_context(result, "last") for result in results}
    rows = []
    for name, one in runs.items():
        other = runs.get(name.replace("_qkv", "_qk"))
        if other not in (None, one):
            rows.append([f"`{name}`", *(difference(one[context], other[context]) for context in one)])
    return markdown(["run", *(f"{context:,}" for context in by_context(results[0], "last"))], rows)


def section(table, results):
    """One table's part of results/README.md."""
    first = results[0]
    contexts = [context for context in by_context(first, "last") if context != first["train_context"]]
    return f"""## {table}

Trained for {first['iter_num']:,} iters; evaluated on {first['stretches']} stretches of {first['longest']:,}
tokens of {first['data']}, on {first['cpu']}, {first['device']}.
Made by `python results/run.py {table}`; the first run:

    python {first['commands'][0]}
    python {first['commands'][1]}

`last`, the same target tokens at every length:

{ratio_table(results, [("last", context) for context in contexts])}

`window`, all tokens of the stretches:

{ratio_table(results, [("window", context) for context in contexts])}

Values carried: loss by `last` of `_qkv` minus that of `_qk`, in nats:

{carried_table(results)}
"""


def between_marks(readme, table, text):
    """README.md with this text between the marks of a table."""
    mark = f"<!-- table: {table} -->\n"
    if mark not in readme:
        raise ValueError(f"README.md has no line {mark.strip()}")
    before, rest = readme.split(mark)
    return f"{before}{mark}{text}\n{rest[rest.index('<!-- end -->'):]}"


def tables():
    """Write everything that shows numbers: results/README.md, README.md between its marks, the figures."""
    text = """# Results

Written by `python results/run.py tables`. A ratio is the perplexity over that at the training context,
± one standard error over the stretches of text, paired.
"""
    readme = (ROOT / "README.md").read_text()
    for table in TABLES:
        results = load(table)
        text += f"\n{section(table, results)}"
        base = results[0]["train_context"]
        columns = [("last", 4 * base), ("last", 16 * base), ("last", 64 * base), ("window", 64 * base)]
        readme = between_marks(readme, table, ratio_table(results, columns))
    figure = plot([result | {"run": result["pos"]} for result in load("tiny")])   # schemes as labels
    figure.savefig(ROOT / "assets" / "extrapolation.png")

    paths = [ROOT / "results" / f"theory-tiny-{pos}.json" for pos in MEASURED]
    measured = [json.loads(path.read_text()) for path in paths]
    theory_plot(measured).savefig(ROOT / "assets" / "theory.png")
    readme = between_marks(readme, "theory", theory_table(measured))
    text += f"\n## theory\n\n    python {measured[0]['command']}\n\n{theory_table(measured)}\n"
    (ROOT / "README.md").write_text(readme)
    (ROOT / "results" / "README.md").write_text(text)


def main(what="", *more):
    try:
        if what == "tables" and not more:
            tables()
        elif what == "theory" and not more:
            measure()
        elif what in TABLES and not more:
            make(what)
        else:
            raise ValueError(f"usage: run.py {'|'.join(TABLES)}|theory|tables")
    except (ValueError, OSError) as error:
        data.die(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
