"""Corpora as token files, and batches as a pure function of (seed, step, rank).

    python data.py stdlib                                        the running Python's standard library as bytes (default corpus)
    python data.py PATH... --name NAME [--encoding bytes|gpt2]   text files, folders of them, .jsonl with a field "text"
    python data.py openwebtext [--tokens 3e9] [--val_tokens 5e6] the paper's corpus, streamed through Hugging Face datasets

All write data/NAME/train.bin and val.bin (uint16 token ids, nanoGPT's format) and meta.json. Any folder with nanoGPT's
train.bin and val.bin works as it is. One document in ten, chosen by a hash of its name, is held out for validation; of
OpenWebText one in twenty, by a hash of its text. An interrupted openwebtext goes on where it stopped, to the same bytes.
"""
import argparse
import hashlib
import json
import logging
import os
import platform
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

EOT = "<|endoftext|>"
OPENWEBTEXT = "Skylion007/openwebtext"           # on the Hugging Face hub: 8,013,769 documents, 9 billion GPT-2 tokens
BATCH_BYTES = 2 ** 22                            # text read ahead, and encoded by all threads, at a time
UNLIMITED = 2 ** 62                              # tokens
SAVE_SECONDS = 10                                # between notes of how far a resumable preparation has come
TEXT = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", ".tex", ".html", ".css", ".json", ".jsonl"}


def die(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def clock(seconds):
    """Seconds -> "m:ss", or "h:mm:ss" from an hour on."""
    minutes, s = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def progress(shown, text):
    """Print text() over the last progress line on stderr, if that is `shown`: a second ago on a terminal, else half a minute.

    shown, -> time of the last line.
    """
    now, tty = time.time(), sys.stderr.isatty()
    if now - shown < (1 if tty else 30):
        return shown
    print(text() + "    ", end="\r" if tty else "\n", file=sys.stderr, flush=True)
    return now


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
    """-> (function from a list of documents' bytes to a list of uint16 arrays that end with <|endoftext|>, vocabulary size).

    Text is taken as it stands: the characters "<|endoftext|>" inside a document are ordinary characters.
    """
    if name == "bytes":                          # no tiktoken needed
        return lambda raws: [np.append(np.frombuffer(raw, np.uint8).astype(np.uint16), np.uint16(256)) for raw in raws], 257
    enc = encoding(name)
    if enc.n_vocab > 2 ** 16:
        raise ValueError(f"the encoding {name} has {enc.n_vocab} tokens; token files are uint16, at most 65,536")

    def encode(raws):
        ids = enc.encode_ordinary_batch([raw.decode("utf-8", "replace") for raw in raws], num_threads=os.cpu_count())
        return [np.array(i + [enc.eot_token], np.uint16) for i in ids]
    return encode, enc.n_vocab


# ---------------------------------------------------------------------------------------------------------------------
# Documents

def stdlib_documents():
    """(relative name, bytes) of the running Python's standard library, test folders left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts) and path.stat().st_size:
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
                if raw := path.read_bytes():
                    yield name, raw
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        raw = json.loads(line)["text"].encode()
                    except (ValueError, KeyError, TypeError, AttributeError):
                        raise ValueError(f"{path}, line {number}: not a JSON object with a text field \"text\"")
                    if raw:
                        yield f"{name}:{number}", raw


def openwebtext_documents(start, repo=OPENWEBTEXT):
    """(text, bytes) of the corpus from document number `start` on, streamed: nothing is stored; what lies before is read past.

    repo: the hub's data set, another one, or a folder of files that `datasets` can read; with a field "text".
    Raises ValueError if `datasets` is missing or the data set cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("openwebtext needs Hugging Face datasets: pip install datasets")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)             # one line of ours instead of its retries
    try:
        try:
            stream = datasets.load_dataset(repo, split="train", streaming=True)
        except RuntimeError:                                                 # datasets 4 refuses a repository with a loading script
            stream = datasets.load_dataset(repo, split="train", streaming=True, revision="refs/convert/parquet")
        for row in stream.skip(start) if start else stream:
            yield row["text"], row["text"].encode("utf-8", "replace")
    except Exception as e:                                                   # whatever the network layer raises
        raise ValueError(f"{repo} cannot be read ({type(e).__name__}: {str(e).strip().partition(chr(10))[0][:100]}): connect to the network and run the "
                         "same command again, name a copy or a folder with --repo, or take another corpus, such as python data.py stdlib")


def is_val(name, share=10):
    """Is this document the one in `share` that is held out? A pure function of its name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:8], "big") % share == 0


def in_batches(documents):
    """Lists of documents, of about BATCH_BYTES each."""
    batch, size = [], 0
    for name, raw in documents:
        batch.append((name, raw))
        size += len(raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_ahead(iterator, pool):
    """The same items; while one is worked on, the next is read in a thread of the pool."""
    item = pool.submit(next, iterator, None)
    while (value := item.result()) is not None:
        item = pool.submit(next, iterator, None)
        yield value


def prepare(documents, out, name_of_encoding="bytes", source="", *, tokens=UNLIMITED, val_tokens=UNLIMITED, share=10, resumable=False):
    """Write out/train.bin, out/val.bin, out/meta.json from (name, bytes) pairs; the files appear whole or not at all.

    documents: a function from a number n to an iterator over all documents but the first n. One document in `share`, by a hash of its
    name, goes to val.bin while that is shorter than val_tokens; the others to train.bin, to `tokens`. Where that leaves one of them
    empty, the last tenth of the text is held out instead. resumable: what an interrupted call leaves, the next one continues, to the same bytes.
    Raises ValueError if there is no text, or an interrupted call had other arguments or other documents.
    """
    encode, vocab_size = encoder(name_of_encoding)
    out, limit = Path(out), {"train": tokens, "val": val_tokens}
    out.mkdir(parents=True, exist_ok=True)
    note, settings = out / "progress.json", {"encoding": name_of_encoding, "source": source, "limit": limit, "share": share}
    partial = {split: out / f"{split}.bin.{'partial' if resumable else os.getpid()}" for split in limit}
    state = settings | {"train": 0, "val": 0, "documents": 0, "last": ""}
    if resumable and not note.exists() and (out / "meta.json").exists():
        meta, size = json.loads((out / "meta.json").read_text()), lambda path: path.stat().st_size if path.exists() else -1
        if all(meta.get(name) == value for name, value in settings.items()) and \
                all(size(out / f"{split}.bin") == 2 * meta[f"{split}_tokens"] for split in limit):
            return meta                                                      # done before
    if resumable and note.exists():
        state = json.loads(note.read_text())
        if any(state[name] != value for name, value in settings.items()):
            raise ValueError(f"{note} is of an interrupted preparation with other settings: repeat those, or delete it to start again")
        print(f"{out}: continuing after {state['documents']:,} documents, {state['train']:,} training tokens", flush=True)
    start = shown = saved = time.time()
    last, before = b"", state["train"]
    digest = lambda raw: hashlib.sha256(raw).hexdigest()

    def where():
        rate = (state["train"] - before) / (time.time() - start)
        goal = f" of {tokens:,} ({100 * state['train'] / tokens:.1f}%), ETA {clock((tokens - state['train']) / max(rate, 1))}"
        return f"{out}: {state['train']:,}{goal if tokens < UNLIMITED else ''} training tokens, {rate:,.0f} tok/s"
    try:
        files = {split: path.open("r+b" if state["documents"] else "wb") for split, path in partial.items()}
        for split, f in files.items():
            f.truncate(2 * state[split])
            f.seek(0, os.SEEK_END)
        rest = documents(max(0, state["documents"] - 1))
        if state["documents"] and digest(last := next(rest, ("", b""))[1]) != state["last"]:
            raise ValueError(f"{source} is no longer what it was when this was interrupted: delete {note} to start again")
        with ThreadPoolExecutor(1) as pool:
            for batch in read_ahead(in_batches(rest), pool):
                for (name, last), ids in zip(batch, encode([raw for _, raw in batch])):
                    split = "val" if is_val(name, share) else "train"
                    ids = ids[:limit[split] - state[split]]
                    files[split].write(ids.tobytes())
                    state[split] += len(ids)
                    state["documents"] += 1
                    if state["train"] == tokens:
                        break
                if state["train"] == tokens:
                    break
                if resumable and time.time() - saved >= SAVE_SECONDS:
                    for f in files.values():
                        f.flush(), os.fsync(f.fileno())
                    write_json(note, state | {"last": digest(last)})
                    saved = time.time()
                shown = progress(shown, where)
        if not resumable and bool(state["train"]) != bool(state["val"]):     # few documents, all on one side
            side = "train" if state["train"] else "val"
            files[side].flush()
            ids = np.fromfile(partial[side], np.uint16)
            cut = len(ids) - min(max(1, len(ids) // 10), val_tokens)
            for split, part in (("train", ids[:min(cut, tokens)]), ("val", ids[cut:])):
                files[split].seek(0), files[split].truncate(), files[split].write(part.tobytes())
                state[split] = len(part)
        for f in files.values():
            f.flush(), os.fsync(f.fileno()), f.close()
        if not state["train"] or not state["val"]:
            raise ValueError(f"{source or 'the input'} gave {state['train']:,} training and {state['val']:,} validation tokens "
                             f"from {state['documents']} documents: it needs more text")
        meta = {"encoding": name_of_encoding, "vocab_size": vocab_size, "train_tokens": state["train"],
                "val_tokens": state["val"], "documents": state["documents"], "source": source} | (settings if resumable else {})
        write_json(out / "meta.json", meta)
        if resumable:
            note.unlink(missing_ok=True)                                     # from here on a kill means starting again
        for split, path in partial.items():
            os.replace(path, out / f"{split}.bin")
        return meta
    finally:
        if not resumable or not note.exists():                               # nothing to go on from
            for path in partial.values():
                path.unlink(missing_ok=True)


@contextmanager
def written_whole(path, mode="w", suffix=None):
    """A file to write under a temporary name, path.suffix (default: the process id); flushed to disk, then renamed: whatever happens, `path` is whole."""
    partial = Path(f"{path}.{suffix or os.getpid()}")
    try:
        with partial.open(mode) as f:
            yield f
            f.flush(), os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path, value):
    """Raises ValueError for not-a-number and infinity."""
    with written_whole(path) as f:
        f.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Reading

def find(data):
    """Folder of a data set: a path that holds val.bin, or a name under data/; "stdlib" is prepared if it is missing."""
    for folder in (Path(data), Path("data") / data):
        if (folder / "train.bin").exists() or (folder / "val.bin").exists():
            return folder
    if data != "stdlib":
        make = "openwebtext" if data == "openwebtext" else "PATH... --name NAME"
        raise ValueError(f"no data set {data}: neither {data}/train.bin nor data/{data}/train.bin exists; make it with python data.py {make}")
    meta = prepare(lambda start: stdlib_documents(), Path("data/stdlib"), "bytes", f"Python {platform.python_version()} standard library")
    print(f"data/stdlib: {meta['source']} as bytes, {meta['train_tokens']:,} + {meta['val_tokens']:,} tokens")
    return Path("data/stdlib")


def vocabulary(folder):
    """Number of token ids of a data set: from meta.json, else GPT-2's, as nanoGPT's files have no such note."""
    meta = Path(folder) / "meta.json"
    try:
        return json.loads(meta.read_text())["vocab_size"] if meta.exists() else 50257
    except (ValueError, KeyError):
        raise ValueError(f"{meta} is not a JSON object with a vocab_size")


def load(folder, split, at_least, vocab_size=None):
    """A split as a read-only uint16 array on disk. Raises ValueError, naming the file, if it is missing, too short, or, where a
    vocab_size is given, holds a token id beyond it (all of the file is read for that)."""
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
    parser.add_argument("paths", nargs="+", help='"stdlib", "openwebtext", or text files and folders')
    parser.add_argument("--encoding", help="bytes, gpt2, or another of tiktoken's with at most 65,536 tokens (default: gpt2 for openwebtext, else bytes)")
    parser.add_argument("--name", help="write to data/NAME (default: the name of the first path)")
    parser.add_argument("--tokens", type=float, help="end of the training split (default: 3e9 for openwebtext, else all)")
    parser.add_argument("--val_tokens", type=float, help="end of the validation split (default: 5e6 for openwebtext, else all)")
    parser.add_argument("--repo", default=OPENWEBTEXT, help="openwebtext: another data set of the Hugging Face hub, or a local folder of its files")
    args = parser.parse_args()
    stdlib, web = args.paths == ["stdlib"], args.paths == ["openwebtext"]
    out = Path("data") / (args.name or Path(args.paths[0]).stem)
    limits = {name: int(min(UNLIMITED, default if given is None else given)) for name, given, default in
              (("tokens", args.tokens, 3e9 if web else UNLIMITED), ("val_tokens", args.val_tokens, 5e6 if web else UNLIMITED))}
    try:
        if min(limits.values()) < 1:
            raise ValueError("--tokens and --val_tokens must be at least 1")
        if stdlib:
            documents, source = lambda start: stdlib_documents(), f"Python {platform.python_version()} standard library"
        elif web:
            documents, source = lambda start: openwebtext_documents(start, args.repo), args.repo
        else:
            documents, source = lambda start: file_documents(args.paths), ", ".join(Path(p).name for p in args.paths)
        meta = prepare(documents, out, args.encoding or ("gpt2" if web else "bytes"), source, **limits,
                       **{"share": 20, "resumable": True} if web else {})
    except (ValueError, OSError) as e:
        die(e)
    except KeyboardInterrupt:
        print(f"interrupted; {'the same command goes on from here' if web else 'nothing was written'}", file=sys.stderr)
        raise SystemExit(130)
    print(f"{out}: {meta['documents']:,} documents, {meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens "
          f"({meta['encoding']}, {meta['vocab_size']:,} ids)")


if __name__ == "__main__":
    main()
