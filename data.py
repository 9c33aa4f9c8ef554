"""Corpora as token files, and batches as a pure function of (seed, step, rank).

    python data.py stdlib                                        the running Python's standard library as bytes (default corpus)
    python data.py PATH... --name NAME [--encoding bytes|gpt2]   text files, folders of them, .jsonl with a field "text"

Both write data/NAME/train.bin and val.bin (uint16 token ids, nanoGPT's format) and meta.json. Any folder with nanoGPT's
train.bin and val.bin works as it is. One document in ten, chosen by a hash of its name, is held out for validation.
"""
import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

import numpy as np

EOT = "<|endoftext|>"
VAL_SHARE = 10                                   # one document in ten is validation
TEXT = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", ".tex", ".html", ".css", ".json", ".jsonl"}


def die(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        die(f"{message}; see --help")


# ---------------------------------------------------------------------------------------------------------------------
# Encodings

def encoding(name):
    """A tiktoken.Encoding: "bytes" (256 bytes and <|endoftext|>) or one of tiktoken's, such as "gpt2".

    Raises ValueError if the name is unknown, or the vocabulary is neither cached nor to be had from the network.
    """
    try:
        import tiktoken
    except ImportError:
        raise ValueError(f"the encoding {name} needs tiktoken: pip install tiktoken")
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={EOT: 256})
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown encoding {name}: bytes, {', '.join(tiktoken.list_encoding_names())}")
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:                       # whatever the network layer raises
        raise ValueError(f"the vocabulary of {name} could not be loaded ({type(e).__name__}): connect to the network once, "
                         "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --encoding bytes")


def encoder(name):
    """-> (function from a document's bytes to a uint16 array that ends with <|endoftext|>, vocabulary size).

    Text is taken as it stands: the characters "<|endoftext|>" inside a document are ordinary characters.
    """
    if name == "bytes":                          # no tiktoken needed
        return lambda raw: np.append(np.frombuffer(raw, np.uint8).astype(np.uint16), np.uint16(256)), 257
    enc = encoding(name)
    if enc.n_vocab > 2 ** 16:
        raise ValueError(f"the encoding {name} has {enc.n_vocab} tokens; token files are uint16, at most 65,536")
    return lambda raw: np.array(enc.encode_ordinary(raw.decode("utf-8", "replace")) + [enc.eot_token], np.uint16), enc.n_vocab


# ---------------------------------------------------------------------------------------------------------------------
# Documents

def stdlib_documents():
    """(relative name, bytes) of the running Python's standard library, test folders left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            yield name.as_posix(), path.read_bytes()


def file_documents(paths):
    """(name, bytes) of text files, of text files in folders, and of the "text" fields of .jsonl lines."""
    for top in map(Path, paths):
        if not top.exists():
            raise ValueError(f"{top} does not exist")
        files = sorted(p for p in top.rglob("*") if p.is_file() and p.suffix in TEXT) if top.is_dir() else [top]
        for path in files:
            name = path.relative_to(top.parent).as_posix()
            if path.suffix != ".jsonl":
                yield name, path.read_bytes()
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        yield f"{name}:{number}", json.loads(line)["text"].encode()
                    except (ValueError, KeyError, TypeError, AttributeError):
                        raise ValueError(f"{path}, line {number}: not a JSON object with a text field \"text\"")


def is_val(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % VAL_SHARE == 0


def prepare(documents, out, name_of_encoding="bytes", source=""):
    """Write out/train.bin, out/val.bin, out/meta.json from (name, bytes) pairs; the files appear whole or not at all.

    A single document is split 90/10 instead. Raises ValueError if there is no text.
    """
    encode, vocab_size = encoder(name_of_encoding)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    partial = {split: out / f"{split}.bin.{os.getpid()}" for split in ("train", "val")}
    counts, n_docs, last = {"train": 0, "val": 0}, 0, None
    try:
        files = {split: path.open("wb") for split, path in partial.items()}
        for name, raw in documents:
            if not raw:
                continue
            split, last, n_docs = "val" if is_val(name) else "train", encode(raw), n_docs + 1
            files[split].write(last.tobytes())
            counts[split] += len(last)
        if n_docs == 1:
            cut = len(last) - max(1, len(last) // VAL_SHARE)
            for split, part in (("train", last[:cut]), ("val", last[cut:])):
                files[split].seek(0), files[split].truncate(), files[split].write(part.tobytes())
                counts[split] = len(part)
        for f in files.values():
            f.close()
        if not counts["train"] or not counts["val"]:
            raise ValueError(f"{source or 'the input'} gave {counts['train']:,} training and {counts['val']:,} validation tokens "
                             f"from {n_docs} documents: it needs more text")
        meta = {"encoding": name_of_encoding, "vocab_size": vocab_size, "train_tokens": counts["train"],
                "val_tokens": counts["val"], "documents": n_docs, "source": source}
        for split, path in partial.items():
            os.replace(path, out / f"{split}.bin")
        write_json(out / "meta.json", meta)
        return meta
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def write_json(path, value):
    """Write through a temporary name, so that the file is never seen half-written. Not-a-number and infinity become null."""
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


# ---------------------------------------------------------------------------------------------------------------------
# Reading

def find(data):
    """Folder of a data set: a path that holds val.bin, or a name under data/; "stdlib" is prepared if it is missing."""
    for folder in (Path(data), Path("data") / data):
        if (folder / "train.bin").exists() or (folder / "val.bin").exists():
            return folder
    if data != "stdlib":
        raise ValueError(f"no data set {data}: neither {data}/train.bin nor data/{data}/train.bin exists; python data.py makes one")
    meta = prepare(stdlib_documents(), Path("data/stdlib"), "bytes", f"Python {platform.python_version()} standard library")
    print(f"data/stdlib: {meta['source']} as bytes, {meta['train_tokens']:,} + {meta['val_tokens']:,} tokens")
    return Path("data/stdlib")


def vocabulary(folder):
    """Number of token ids of a data set: from meta.json, else GPT-2's, as nanoGPT's files have no such note."""
    meta = Path(folder) / "meta.json"
    try:
        return json.loads(meta.read_text())["vocab_size"] if meta.exists() else 50257
    except (ValueError, KeyError):
        raise ValueError(f"{meta} is not a JSON object with a vocab_size")


def load(folder, split, at_least):
    """A split as a read-only uint16 array on disk. Raises ValueError, naming the file, if it is missing or too short."""
    path = Path(folder) / f"{split}.bin"
    size = path.stat().st_size if path.is_file() else 0
    if not size:
        raise ValueError(f"{path} is {'empty' if path.is_file() else 'missing'}: make it with python data.py")
    if size % 2:
        raise ValueError(f"{path} has an odd number of bytes ({size:,}): truncated, or not uint16 tokens")
    if size // 2 < at_least:
        raise ValueError(f"{path} has {size // 2:,} tokens, needs at least {at_least:,} (context + 1)")
    return np.memmap(path, np.uint16, "r")


def batch(tokens, step, seed, rank=0, world_size=1, *, batch_size, block_size):
    """This rank's share of the step's `batch_size` sequences, drawn with replacement: a pure function of its arguments.

    tokens uint16 array -> x, y (batch_size / world_size, block_size) int64, y one token ahead of x. The sequences of a step do
    not depend on world_size, so a run may resume on another number of ranks and see the same stream.
    """
    draw = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, step, 0]))
    starts = draw.integers(0, len(tokens) - block_size, size=batch_size)[rank::world_size]
    rows = np.stack([tokens[i:i + block_size + 1] for i in starts]).astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help='"stdlib", or text files and folders')
    parser.add_argument("--encoding", default="bytes", help="bytes, gpt2, or another of tiktoken's with at most 65,536 tokens")
    parser.add_argument("--name", help="write to data/NAME (default: the name of the first path)")
    args = parser.parse_args()
    stdlib = args.paths == ["stdlib"]
    out = Path("data") / (args.name or Path(args.paths[0]).stem)
    source = f"Python {platform.python_version()} standard library" if stdlib else ", ".join(Path(p).name for p in args.paths)
    try:
        meta = prepare(stdlib_documents() if stdlib else file_documents(args.paths), out, args.encoding, source)
    except (ValueError, OSError) as e:
        die(e)
    print(f"{out}: {meta['documents']:,} documents, {meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens "
          f"({meta['encoding']}, {meta['vocab_size']:,} ids)")


if __name__ == "__main__":
    main()
