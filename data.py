"""Text as files of token ids, and batches as a pure function of (seed, iteration, rank).

    python data.py stdlib                                   the running Python's standard library (default)
    python data.py PATH... [--name NAME] [--encoding gpt2]  text files, folders, .jsonl with a field "text"
    python data.py openwebtext [--tokens 3e9]               the paper's corpus, from the Hugging Face hub

Each writes data/NAME/train.bin and val.bin (uint16 ids, nanoGPT's format) and meta.json, whole or not at all.
Any folder with nanoGPT's train.bin and val.bin works as it is.

The split: one document in ten, chosen by a hash of its name, is held out for validation (of OpenWebText one
in twenty, by a hash of its text); held-out documents that mostly copy training text are dropped. Where that
leaves one side empty, as for a single file, the last tenth of the text is held out. Documents are joined,
<|endoftext|> after each, and windows are cut from the whole: they cross the borders of documents.
"""
import argparse
import hashlib
import json
import logging
import mmap
import os
import pickle
import platform
import signal
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np

EOT = "<|endoftext|>"
OPENWEBTEXT = "Skylion007/openwebtext"           # 8,013,769 documents, 9 billion GPT-2 tokens
STDLIB = f"Python {platform.python_version()} standard library"
UNLIMITED = 2 ** 62                              # tokens
LOOKED_FOR = 2 ** 18                             # shingles of held-out text to look for in training text
TEXT = set(".txt .md .rst .py .c .h .cpp .js .ts .java .go .rs .tex .html .css .json .jsonl".split())
PACKED = b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PAR1"  # first bytes


def die(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        die(f"{message}; see --help")


def clock(seconds):
    """Seconds -> "m:ss", or "h:mm:ss" from an hour on."""
    minutes, s = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def progress(shown, text):
    """Print text() on stderr if the last line, of time `shown`, is old enough -> time of the last line."""
    now, tty = time.time(), sys.stderr.isatty()
    if now - shown < (1 if tty else 30):
        return shown
    print(text() + "    ", end="\r" if tty else "\n", file=sys.stderr, flush=True)
    return now


@contextmanager
def written_whole(path, mode="w", suffix=None):
    """A file to write as path.suffix (default: process id) and rename at the end: `path` is always whole."""
    partial = Path(f"{path}.{suffix or os.getpid()}")
    try:
        with partial.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path, value, suffix=None):
    """Raises ValueError for not-a-number and infinity."""
    with written_whole(path, suffix=suffix) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def alone(folder):
    """Make the folder and wait until no other process is in here. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = None
    try:
        with suppress(ImportError, OSError):     # Windows, and network disks without locks
            import fcntl
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)
        with suppress(OSError):
            folder.rmdir()                       # succeeds only if nothing was written


# -----------------------------------------------------------------------------------------------------------
# Encodings

def encoding(name):
    """A tiktoken.Encoding: "bytes", one of tiktoken's ("gpt2"), or one cut to its first ids ("gpt2:8192").

    "bytes" has 257 ids: the bytes and <|endoftext|>. A cut encoding keeps the first merges, <|endoftext|> is
    its last id, and it encodes any text. ValueError if unknown, or the vocabulary cannot be loaded.
    """
    try:
        import tiktoken
    except ImportError:
        raise ValueError(f"the encoding {name} needs tiktoken: pip install tiktoken")
    base, cut, size = name.partition(":")
    if name == "bytes":
        pattern, ranks, size = r"[\s\S]{1,64}", {bytes([i]): i for i in range(256)}, 257
    elif base not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown encoding {name}: bytes, {', '.join(tiktoken.list_encoding_names())}")
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
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: end})


def encoder(name):
    """-> function from a list of documents' bytes to a list of uint16 arrays, and the vocabulary size.

    Each array ends with <|endoftext|>; the same characters inside a document are ordinary characters.
    """
    if name == "bytes":                          # no tiktoken needed
        end = np.array([256], np.uint16)
        return lambda raws: [np.append(np.frombuffer(raw, np.uint8), end) for raw in raws], 257
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
        if not skip & set(name.parts) and path.stat().st_size:
            yield name.as_posix(), path.read_bytes()


def file_documents(paths):
    """Text files, also in folders, and the texts of .jsonl lines. ValueError for a path that is no text."""
    for top in map(Path, paths):
        if not top.exists():
            raise ValueError(f"{top} does not exist")
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in filter(Path.is_file, files):
            name, suffix = path.relative_to(top.parent).as_posix(), path.suffix.lower()
            raw = b""
            if path == top or suffix in TEXT:
                with path.open("rb") as file:
                    raw = file.read(4096 if suffix == ".jsonl" else -1)
            if raw.startswith(PACKED) or b"\0" in raw:
                if path == top:
                    raise ValueError(f"{path} is compressed or binary: name a text file (UTF-8) instead")
                raw = b""
            if raw and suffix == ".jsonl":
                yield from jsonl_documents(path, name)
            else:
                yield name, raw


def jsonl_documents(path, name):
    """The field "text" of each line; lone surrogates become "?". ValueError for a line without that field."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"] if line.strip() else None
                raw = b"" if text is None else text.encode("utf-8", "replace")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{path}, line {number}: not a JSON object with a text field \"text\"")
            yield f"{name}:{number}", raw


def openwebtext_documents(repo):
    """The texts of a data set of the hub, or of a folder that `datasets` can read, streamed.

    Raises ValueError if `datasets` is missing or the data set cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("openwebtext needs Hugging Face datasets: pip install datasets")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)           # one line of ours, not its retries
    how = {"split": "train", "streaming": True}
    try:
        try:
            rows = datasets.load_dataset(repo, **how)
        except RuntimeError:                     # datasets 4 refuses a repository with a loading script
            rows = datasets.load_dataset(repo, **how, revision="refs/convert/parquet")
        for row in rows:
            text = row["text"] or ""
            yield text, text.encode("utf-8", "replace")
    except Exception as e:                       # whatever the network layer raises
        reason = str(e).strip().partition("\n")[0][:100]
        raise ValueError(f"{repo} cannot be read ({type(e).__name__}: {reason}): connect to the network and "
                         "run this again, name a copy with --repo, or take another corpus, such as stdlib")


# -----------------------------------------------------------------------------------------------------------
# Preparing

def is_val(name, one_in=10):
    """Is this document the one in `one_in` that is held out? A pure function of its name."""
    digest = hashlib.sha256(name.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def shingles(ids):
    """A 64-bit hash of every 32 ids in a row: (T,) -> (T - 31,) uint64, a polynomial in an odd number."""
    hashes = ids.astype(np.uint64)
    for width in (1, 2, 4, 8, 16):               # two hashes of `width` ids make one of twice as many
        factor = np.uint64(pow(0x9E3779B97F4A7C15, width, 2 ** 64))
        hashes = hashes[:-width] * factor + hashes[width:]
    return hashes


def without_copies(documents, train):
    """The documents (lists of ids) of which at most half of the shingles occur in the ids of `train`.

    Of many shingles only those with the smallest hashes are looked for, so memory is bounded. A document
    shorter than a shingle stays.
    """
    total = sum(map(len, documents))
    limit = min(2 ** 64 - 1, 2 ** 64 * LOOKED_FOR // max(1, total))
    hashes = [h[h <= limit] for h in map(shingles, documents)]
    known = np.unique(np.concatenate([*hashes, np.array([limit], np.uint64)]))
    copied = np.zeros(len(known), bool)
    for start in range(0, len(train), 2 ** 18):
        found = shingles(train[start:start + 2 ** 18 + 31])
        found = found[found <= limit]
        place = np.searchsorted(known, found)
        copied[place[known[place] == found]] = True
    copies = [len(h) > 0 and copied[np.searchsorted(known, h)].mean() > 0.5 for h in hashes]
    return [document for document, copy in zip(documents, copies) if not copy]


def encoded(documents, encode):
    """(name, ids) of each document, encoded 64 at a time over all threads."""
    documents = iter(documents)
    while batch := list(islice(documents, 64)):
        yield from zip([name for name, _ in batch], encode([raw for _, raw in batch]))


def write_train(documents, file, tokens, val_tokens, one_in, label):
    """Write the training documents to a file -> held-out documents, number read, number without text."""
    held_out, held, written, count, empty = [], 0, 0, 0, 0
    start = shown = time.time()

    def so_far():
        rate = written / (time.time() - start)
        text = f"{label}: {written:,} training tokens, {rate:,.0f} tok/s"
        if tokens == UNLIMITED:
            return text
        return f"{text}, {100 * written / tokens:.1f}%, ETA {clock((tokens - written) / max(rate, 1))}"

    for name, ids in documents:
        if len(ids) == 1:                        # nothing but <|endoftext|>
            empty += 1
            continue
        count += 1
        if is_val(name, one_in):
            if held < val_tokens:
                held_out.append(ids[:val_tokens - held])
                held += len(held_out[-1])
        else:
            ids = ids[:tokens - written]
            file.write(ids.tobytes())
            written += len(ids)
        if written == tokens:
            break
        shown = progress(shown, so_far)
    return held_out, count, empty


def last_tenth(file, documents, tokens, val_tokens):
    """All text is on one side: make the file its first nine tenths -> [the rest]."""
    ids = np.concatenate([np.fromfile(file.name, np.uint16), *documents])
    cut = max(0, len(ids) - min(max(1, len(ids) // 10), val_tokens))
    file.seek(0)
    file.truncate()
    file.write(ids[:min(cut, tokens)].tobytes())
    return [ids[cut:]]


def prepare(documents, out, name="bytes", source="", tokens=UNLIMITED, val_tokens=UNLIMITED, one_in=10):
    """Write out/train.bin, val.bin and meta.json, within `alone(out)`.

    documents (name, bytes) pairs; one in `one_in` is held out, to val_tokens, the others are training text,
    to `tokens`; name: of the encoding. ValueError for too little text, or a folder of another source.
    """
    encode, vocab_size = encoder(name)
    bins = out / "train.bin", out / "val.bin"
    if any(path.exists() for path in bins) and note(out).get("source") != source:
        raise ValueError(f"{out} holds {note(out).get('source', 'text of unknown source')}: choose another "
                         "--name, or delete it first")
    with written_whole(bins[0], "w+b", "partial") as train, written_whole(bins[1], "wb", "partial") as val:
        documents = encoded(documents, encode)
        held_out, count, empty = write_train(documents, train, tokens, val_tokens, one_in, out)
        train.flush()
        kept = held_out
        if train.tell():
            kept = without_copies(held_out, np.memmap(train.name, np.uint16, "r"))
        left_out = {"empty": empty, "copies": len(held_out) - len(kept)}
        if not train.tell() or not kept:
            kept = last_tenth(train, kept, tokens, val_tokens)
        val.write(np.concatenate(kept).tobytes())

        sizes = train.tell() // 2, val.tell() // 2
        if 0 in sizes:
            raise ValueError(f"{source or 'the input'} gave {sizes[0]:,} training and {sizes[1]:,} "
                             f"validation tokens from {count} documents: it needs more text")
        meta = {"encoding": name, "vocab_size": vocab_size, "train_tokens": sizes[0], "val_tokens": sizes[1],
                "documents": count, "left_out": left_out, "source": source}
        for path in bins:                        # old and new files never stand side by side
            path.unlink(missing_ok=True)
        write_json(out / "meta.json", meta, "partial")
    print(f"{out}: {count:,} documents, {sizes[0]:,} training and {sizes[1]:,} validation tokens "
          f"({name}, {vocab_size:,} ids)\n{out}: left out {empty:,} files or lines without text, and "
          f"{left_out['copies']:,} held-out documents that copy training text")


# -----------------------------------------------------------------------------------------------------------
# Reading

def find(name):
    """Folder of a data set: a path with token files, or a name under data/; makes "stdlib" if missing."""
    default = Path("data/stdlib")
    if name == "stdlib" and not (default / "train.bin").exists():
        with alone(default):
            if not (default / "train.bin").exists():         # else another process has just made it
                prepare(stdlib_documents(), default, "bytes", STDLIB)
    for folder in (Path(name), Path("data") / name):
        if (folder / "train.bin").exists() or (folder / "val.bin").exists():
            return folder
    make = "openwebtext" if name == "openwebtext" else "PATH... --name NAME"
    raise ValueError(f"no data set {name}: neither {name}/train.bin nor data/{name}/train.bin exists; "
                     f"make it with python data.py {make}")


class PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, strings and numbers; refuses everything that could run code."""
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def characters(folder):
    """The characters of nanoGPT's meta.pkl in the order of their ids: characters(folder)[id] decodes one."""
    path = Path(folder) / "meta.pkl"
    try:
        with path.open("rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        letters = [itos[i] for i in range(len(itos))]
    except Exception:                            # whatever damaged pickles raise
        letters = []
    if not letters or not all(isinstance(letter, str) for letter in letters):
        raise ValueError(f"{path} is not nanoGPT's dictionary with itos, the character of every id")
    return letters


def note(folder):
    """What a folder says of its text: meta.json, else the characters of nanoGPT's meta.pkl, else {}."""
    meta = Path(folder) / "meta.json"
    if meta.exists():
        try:
            value = json.loads(meta.read_text())
            if value["vocab_size"] in range(1, 2 ** 16 + 1):
                return value
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{meta} is not a JSON object with a vocab_size from 1 to 65,536")
    if not (meta.parent / "meta.pkl").exists():
        return {}
    letters = characters(folder)
    digest = hashlib.sha256(repr(letters).encode()).hexdigest()
    return {"encoding": f"characters:{digest[:8]}", "vocab_size": len(letters)}


def describe(folder):
    """-> name of the encoding, number of ids; without a note: "unknown", one more than the highest id."""
    known = note(folder)
    if known:
        return known.get("encoding", "unknown"), known["vocab_size"]
    splits = [split for split in ("train", "val") if (Path(folder) / f"{split}.bin").exists()]
    return "unknown", 1 + max(int(load(folder, split, 1).max()) for split in splits or ["train"])


def check_encoding(folder, encoding, vocab_size=None):
    """Raises ValueError if the folder's text has another encoding than a checkpoint's (encoding, vocab_size).

    Where one is "unknown" (token files without a note) the sizes decide, if given: more than four times
    apart, they are different encodings; nearer ones cannot be told apart and pass.
    """
    here, size = describe(folder)
    if "unknown" in (here, encoding):
        same = vocab_size is None or max(size, vocab_size) <= 4 * min(size, vocab_size)
    else:
        same = here == encoding
    if not same:
        raise ValueError(f"{folder} is text in the encoding {here} ({size:,} ids), the checkpoint's is "
                         f"{encoding}: name data in that encoding")


def load(folder, split, at_least, vocab_size=None):
    """A split as a read-only uint16 array on disk.

    Raises ValueError, naming the file, if it is missing, too short, or, where a vocab_size is given, holds
    an id beyond it (all of the file is read for that).
    """
    path = Path(folder) / f"{split}.bin"
    size = path.stat().st_size if path.is_file() else 0
    if not size:
        raise ValueError(f"{path} is {'empty' if path.is_file() else 'missing'}: make it with python data.py")
    if size % 2:
        raise ValueError(f"{path} has an odd number of bytes ({size:,}): truncated, or not uint16 tokens")
    if size // 2 < at_least:
        raise ValueError(f"{path} has {size // 2:,} tokens, needs at least {at_least:,} (context + 1)")
    tokens = np.memmap(path, np.uint16, "r")
    if vocab_size is not None and int(tokens.max()) >= vocab_size:
        raise ValueError(f"{path} holds a token id {int(tokens.max()):,}, beyond the model's {vocab_size:,}")
    return tokens


def batch(tokens, iter_num, seed, rank=0, world_size=1, *, batch_size, block_size):
    """This rank's part of an iteration's `batch_size` sequences, drawn with replacement: a pure function.

    tokens uint16 array -> x, y (batch_size / world_size, block_size) int64, y one token ahead of x. What an
    iteration reads does not depend on world_size: a run may resume on another number of ranks.
    """
    draw = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, iter_num, 0]))
    starts = draw.integers(0, len(tokens) - block_size, size=batch_size)[rank::world_size]
    rows = np.stack([tokens[i:i + block_size + 1] for i in starts]).astype(np.int64)
    if isinstance(tokens, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        tokens._mmap.madvise(mmap.MADV_DONTNEED)             # pages once read do not add up in this process
    return rows[:, :-1], rows[:, 1:]


# -----------------------------------------------------------------------------------------------------------
# Command line

def folder_for(path, name):
    """data/NAME; by default the name of the path, without the suffix of a text file."""
    path = Path(os.path.abspath(path))
    without_suffix = path.suffix.lower() in TEXT and not path.is_dir()
    name = name or (path.stem if without_suffix else path.name)
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"data/{name} is no folder of its own: give a plain name with --name")
    return Path("data") / name


def token_count(text):
    """"3e9" -> 3000000000."""
    value = float(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(min(value, UNLIMITED))


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", help='"stdlib", "openwebtext", or text files and folders')
    add("--encoding", help="bytes, gpt2, gpt2:8192 (its first 8,192 ids), or another of tiktoken's with at "
        "most 65,536 ids (default: gpt2 for openwebtext, else bytes)")
    add("--name", help="write to data/NAME (default: the name of the first path)")
    add("--tokens", type=token_count, help="of the training split (default: 3e9 for openwebtext, else all)")
    add("--val_tokens", type=token_count, help="of validation (default: 5e6 for openwebtext, else all)")
    add("--repo", default=OPENWEBTEXT, help="openwebtext: another data set of the hub, or a local folder")
    return parser.parse_args()


def main():
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    limits = args.tokens or UNLIMITED, args.val_tokens or UNLIMITED
    encoding_name, one_in = args.encoding or "bytes", 10
    if args.paths == ["stdlib"]:
        documents, source = stdlib_documents(), STDLIB
    elif args.paths == ["openwebtext"]:
        documents, source = openwebtext_documents(args.repo), args.repo
        limits = args.tokens or 3 * 10 ** 9, args.val_tokens or 5 * 10 ** 6
        encoding_name, one_in = args.encoding or "gpt2", 20
    else:
        documents = file_documents(args.paths)
        source = ", ".join(str(Path(path).resolve()) for path in args.paths)
    try:
        out = folder_for(args.paths[0], args.name)
        with alone(out):
            prepare(documents, out, encoding_name, source, *limits, one_in)
    except (ValueError, OSError) as e:
        die(e)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130)


if __name__ == "__main__":
    main()
