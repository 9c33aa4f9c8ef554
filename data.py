"""Text as files of token ids, and batches as a pure function of (seed, iteration, rank).

    python data.py stdlib                                   the running Python's standard library (default)
    python data.py PATH... [--name NAME] [--encoding gpt2]  text files, folders, .jsonl with a field "text"
    python data.py openwebtext [--tokens 3e9]               the paper's corpus, from the Hugging Face hub

Each makes a new folder data/NAME, whole or not at all: train.bin and val.bin (uint16 ids, nanoGPT's format)
and meta.json. A folder of nanoGPT's files can be read as it is.

One document in ten, chosen by a hash of its name (OpenWebText: of its text), never the first, is held out,
and dropped if it mostly copies training text. If none is left, as of a single file, the last tenth of the
text is held out. Documents are joined, <|endoftext|> after each, and windows cross their borders.
"""
import argparse
import hashlib
import json
import os
import pickle
import platform
import shutil
import signal
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np

OPENWEBTEXT = "Skylion007/openwebtext"           # 8,013,769 documents, 9 billion GPT-2 tokens
STDLIB = f"Python {platform.python_version()} standard library"
TEXT = ".txt .md .rst .py .c .h .cpp .js .ts .java .go .rs .tex .html .css .json .jsonl".split()


def die(message):
    """Bad input: one line on stderr, exit status 2."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def one_line_errors():
    """Bad input within ends as in `die`, Ctrl-C with one line and exit status 130."""
    try:
        yield
    except (ValueError, OSError) as error:
        die(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        die(f"{message}; see --help")


def clock(seconds):
    """Seconds -> "m:ss", or "h:mm:ss" from an hour on."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def progress(shown, text):
    """Print the text on stderr if the last line, of time `shown`, is old enough -> time of the last line."""
    now, tty = time.time(), sys.stderr.isatty()
    if now - shown < (1 if tty else 30):
        return shown
    with suppress(OSError):                      # the terminal may have gone
        print(text + "    ", end="\r" if tty else "\n", file=sys.stderr, flush=True)
    return now


@contextmanager
def written_whole(path, mode="w", suffix=".partial"):
    """A file to write with this suffix and rename at the end: `path` is always whole."""
    partial = Path(f"{path}{suffix}")
    try:
        with partial.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path, value):
    """Raises ValueError for not-a-number and infinity. Several processes may write the same file."""
    with written_whole(path, suffix=f".{os.getpid()}.partial") as file:
        file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


# -----------------------------------------------------------------------------------------------------------
# Encodings

def encoding(name):
    """A tiktoken.Encoding: "bytes", one of tiktoken's ("gpt2"), or one cut to its first merges ("gpt2:8192").

    The last id of "bytes" and of a cut one is <|endoftext|>. ValueError if unknown or not to be loaded.
    """
    import tiktoken
    base, cut, size = name.partition(":")
    if name == "bytes":
        pattern, ranks, size = r"[\s\S]{1,64}", {bytes([i]): i for i in range(256)}, 257
    elif base not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown encoding {name}: not bytes, nor one of {tiktoken.list_encoding_names()}")
    else:
        try:
            whole = tiktoken.get_encoding(base)
        except Exception as e:                   # whatever the network layer raises
            raise ValueError(f"the vocabulary of {base} could not be loaded ({type(e).__name__}): connect to "
                             "the network, point TIKTOKEN_CACHE_DIR to a copy, or use --encoding bytes")
        if not cut:
            return whole
        if not (size.isdecimal() and 257 <= int(size) <= whole.n_vocab):
            raise ValueError(f"encoding {name}: {base}:N needs N from 257 to {whole.n_vocab}")
        pattern, ranks = whole._pat_str, whole._mergeable_ranks
    end = int(size) - 1
    ranks = {token: rank for token, rank in ranks.items() if rank < end}
    special = {"<|endoftext|>": end}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def encoder(name):
    """-> function from documents' bytes to uint16 arrays that end with <|endoftext|>, and vocabulary size."""
    if name == "bytes":                          # no tiktoken needed
        def encode_bytes(raws):
            return [np.append(np.frombuffer(raw, np.uint8), np.uint16(256)) for raw in raws]
        return encode_bytes, 257
    enc = encoding(name)
    if enc.n_vocab > 2 ** 16:
        raise ValueError(f"the encoding {name} has {enc.n_vocab} ids; token files are uint16: at most 65,536")
    def encode(raws):
        texts = [raw.decode("utf-8", "replace") for raw in raws]
        lists = enc.encode_ordinary_batch(texts, num_threads=os.cpu_count())
        return [np.array(ids + [enc.eot_token], np.uint16) for ids in lists]
    return encode, enc.n_vocab


# -----------------------------------------------------------------------------------------------------------
# Documents: (name, bytes) pairs, with no bytes for what is left out

def stdlib_documents():
    """The running Python's standard library by relative path, test folders left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            yield name.as_posix(), path.read_bytes()


def file_documents(paths):
    """Text files, also in folders, and the texts of .jsonl lines. ValueError for a path that is no text."""
    for top in map(Path, paths):
        if not top.exists():
            raise ValueError(f"{top} does not exist")
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in filter(Path.is_file, files):
            name, suffix = path.relative_to(top.parent).as_posix(), path.suffix.lower()
            if suffix == ".jsonl":
                yield from jsonl_documents(path, name)
                continue
            raw = path.read_bytes() if path == top or suffix in TEXT else b""
            if b"\0" in raw:                     # packed files, parquet, UTF-16
                if path == top:
                    raise ValueError(f"{path} is compressed or binary: name a text file (UTF-8) instead")
                raw = b""
            yield name, raw


def jsonl_documents(path, name):
    """The field "text" of each line; lone surrogates become "?". ValueError for a line without that field."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"] if line.strip() else None
                yield f"{name}:{number}", (text or "").encode("utf-8", "replace")
            except Exception:
                raise ValueError(f"{path}, line {number}: not a JSON object with a text field \"text\"")


def openwebtext_documents():
    """The texts of OpenWebText, streamed. ValueError without `datasets` or a network."""
    how = {"path": OPENWEBTEXT, "split": "train", "streaming": True}
    try:
        import datasets
        try:
            rows = datasets.load_dataset(**how)
        except RuntimeError:                     # datasets 4 refuses a repository with a loading script
            rows = datasets.load_dataset(**how, revision="refs/convert/parquet")
        for row in rows:
            yield row["text"], row["text"].encode("utf-8", "replace")
    except Exception as e:                       # whatever the network layer raises
        raise ValueError(f"{OPENWEBTEXT} cannot be read ({e!r}): pip install datasets, "
                         "connect to the network and run this again, or take another corpus")


# -----------------------------------------------------------------------------------------------------------
# Preparing

def is_val(name):
    """Is this document the one in ten that is held out? A pure function of its name."""
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
    return int(digest[:16], 16) % 10 == 0


def write_train(documents, encode, file, tokens, val_tokens):
    """Write training text to the file -> held-out documents, tokens written, number of empty documents."""
    documents = iter(documents)
    held_out, held, written, empty = [], 0, 0, 0
    start = shown = time.time()
    while written < tokens and (batch := list(islice(documents, 64))):
        arrays = encode([raw for _, raw in batch])
        for (name, raw), ids in zip(batch, arrays):
            if not raw:
                empty += 1
            elif not written or not is_val(name):
                ids = ids[:tokens - written]
                file.write(ids.tobytes())
                written += len(ids)
            elif held < val_tokens:
                held_out.append(ids[:val_tokens - held])
                held += len(held_out[-1])
        rate = (written + 1) / (time.time() - start + 0.001)
        shown = progress(shown, f"{written:,} of at most {tokens:,} training tokens, {rate:,.0f} tok/s, "
                                f"ETA {clock((tokens - written) / rate)}")
    return held_out, written, empty


def shingles(ids):
    """Hashes of every 32 ids in a row, one in four of them: a set of numbers below 2^62."""
    factors = [pow(0x9E3779B97F4A7C15, i, 2 ** 64) for i in range(32)]
    hashes = np.convolve(ids.astype(np.uint64), np.array(factors, np.uint64), "valid")
    return set(hashes[hashes < 2 ** 62].tolist())


def without_copies(documents, train):
    """The documents of which at most half of the shingles occur in the ids of `train`; of fewer than 32 ids,
    all."""
    hashes = [shingles(ids) for ids in documents]
    known, copied = set().union(*hashes), set()
    for start in range(0, len(train), 2 ** 18):
        copied |= known & shingles(train[start:start + 2 ** 18])
    return [ids for ids, own in zip(documents, hashes) if 2 * len(own & copied) <= len(own)]


def prepare(documents, out, source, name="bytes", tokens=3 * 10 ** 9, val_tokens=5 * 10 ** 6):
    """Make the folder `out` from (name, bytes) pairs. ValueError if it exists, or for too little text."""
    if out.exists():
        raise ValueError(f"{out} exists: delete it first, or choose another --name")
    encode, vocab_size = encoder(name)
    partial = Path(f"{out}.{os.getpid()}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        path = partial / "train.bin"
        with path.open("wb") as file:
            held_out, written, empty = write_train(documents, encode, file, tokens, val_tokens)
        if written < 10:
            raise ValueError(f"{source} has {written} training tokens, it needs more text")
        kept = without_copies(held_out, np.memmap(path, np.uint16, "r"))
        copies = len(held_out) - len(kept)
        if not kept:                             # hold out the last tenth of the text
            train = np.fromfile(path, np.uint16)
            written -= written // 10
            train[:written].tofile(path)
            kept = [train[written:][:val_tokens]]
        val = np.concatenate(kept)
        val.tofile(partial / "val.bin")
        write_json(partial / "meta.json", {
            "encoding": name, "vocab_size": vocab_size, "train_tokens": written, "val_tokens": len(val),
            "empty": empty, "copies": copies, "source": source,
        })
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: {source} as {name}, {written:,} + {len(val):,} tokens; left out: {empty} files or lines "
          f"without text, {copies} held-out documents that copy training text")


# -----------------------------------------------------------------------------------------------------------
# Reading

def find(name):
    """Folder of a data set: a path with token files, or a name under data/; makes "stdlib" if missing."""
    default = Path("data/stdlib")
    if name == "stdlib" and not default.exists():
        try:
            prepare(stdlib_documents(), default, STDLIB)
        except (ValueError, OSError):
            if not default.exists():             # else another process has just made it
                raise
    for folder in (Path(name), Path("data") / name):
        if any(folder.glob("*.bin")):
            return folder
    raise ValueError(f"no data set {name}: {name} and data/{name} hold no token files; see data.py --help")


class PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, strings and numbers; refuses everything that could run code."""
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def noted(folder):
    """-> name of the encoding, number of ids, as meta.json or nanoGPT's meta.pkl say; None without them."""
    meta, letters = Path(folder) / "meta.json", Path(folder) / "meta.pkl"
    try:
        if meta.exists():
            known = json.loads(meta.read_text())
            return known["encoding"], int(known["vocab_size"])
        if letters.exists():
            with letters.open("rb") as file:
                itos = PlainUnpickler(file).load()["itos"]
            return f"characters:{hashlib.sha256(repr(itos).encode()).hexdigest()[:8]}", len(itos)
    except Exception as e:                       # whatever damaged pickles raise
        raise ValueError(f"meta.json or meta.pkl in {folder} tells no encoding and vocabulary size ({e!r})")


def describe(folder):
    """What is noted of a data set; else its encoding is "unknown", its number of ids that of the highest."""
    bins = Path(folder).glob("*.bin")
    return noted(folder) or ("unknown", 1 + max(int(load(folder, path.stem, 1).max()) for path in bins))


def check_encoding(folder, encoding):
    """ValueError if the folder's text is known to have another encoding than a checkpoint's."""
    here, _ = noted(folder) or (encoding, 0)
    if here != encoding != "unknown":
        raise ValueError(f"{folder} is text in {here}, the checkpoint's is in {encoding}: name other data")


def load(folder, split, at_least, vocab_size=None):
    """A split as a uint16 array on disk. ValueError if missing, too short, or with ids beyond vocab_size."""
    path = Path(folder) / f"{split}.bin"
    size = path.stat().st_size if path.exists() else 0
    if not size:
        raise ValueError(f"{path} is missing or empty: make it with python data.py")
    if size % 2:
        raise ValueError(f"{path} has an odd number of bytes ({size:,}): truncated, or not uint16 tokens")
    if size // 2 < at_least:
        raise ValueError(f"{path} has {size // 2:,} tokens, needs at least {at_least:,} (context + 1)")
    tokens = np.memmap(path, np.uint16, "r")
    if vocab_size and tokens.max() >= vocab_size:
        raise ValueError(f"{path} holds a token id {tokens.max():,}, beyond the model's {vocab_size:,}")
    return tokens


def batch(tokens, iter_num, seed, rank=0, world_size=1, *, batch_size, block_size):
    """This rank's part of an iteration -> x, y (batch_size / world_size, block_size) int64, y one ahead of x.

    A pure function, drawn with replacement: what all ranks read together does not depend on their number.
    """
    draw = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, iter_num, 0]))
    starts = draw.integers(0, len(tokens) - block_size, size=batch_size)[rank::world_size]
    rows = np.stack([tokens[i:i + block_size + 1] for i in starts]).astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def folder_for(path, name):
    """data/NAME; by default the name of the path."""
    name = name or Path(os.path.abspath(path)).stem
    if Path(name).name != name or name == "..":
        raise ValueError(f"data/{name} is no folder of its own: give a plain name with --name")
    return Path("data") / name


def token_count(text):
    """"3e9" -> 3000000000."""
    if not 1 <= float(text) < 2 ** 62:
        raise ValueError
    return int(float(text))


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", help='"stdlib", "openwebtext", or text files and folders')
    add("--encoding", help="bytes, gpt2, gpt2:8192, ... (default: gpt2 for openwebtext, else bytes)")
    add("--name", help="write to data/NAME (default: the name of the first path)")
    add("--tokens", type=token_count, default="3e9", help="at most so many for training (default: 3e9)")
    add("--val_tokens", type=token_count, default="5e6", help="at most so many for validation (default: 5e6)")
    args = parser.parse_args()
    documents, source, encoding_name = file_documents(args.paths), ", ".join(args.paths), "bytes"
    if args.paths == ["stdlib"]:
        documents, source = stdlib_documents(), STDLIB
    if args.paths == ["openwebtext"]:
        documents, source, encoding_name = openwebtext_documents(), OPENWEBTEXT, "gpt2"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without removing what is half made
    with one_line_errors():
        out = folder_for(args.paths[0], args.name)
        prepare(documents, out, source, args.encoding or encoding_name, args.tokens, args.val_tokens)


if __name__ == "__main__":
    main()
