"""Tokenizes spool parts into token shards, in this process or in worker processes.

How: a worker is a fresh Python that runs `main` below; it reads one JSON job a line on standard input and
answers each with one line. When the parent dies (kill -9 included) its input ends, and so does the worker. A part gives
the same shard whichever worker takes it, so the corpus does not depend on their number.

Rejected: `ProcessPoolExecutor`: its spawned workers import the caller's main module again (a script without the
`__name__` guard runs twice), and after a kill -9 of the parent they wait forever. Limits: one machine.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trimtab.core.atomic import storage_error
from trimtab.core.errors import RunError
from trimtab.data.index import ShardWriter
from trimtab.data.spool import read_part
from trimtab.data.tokenize import Tokenizer

_BATCH_BYTES = 2 << 20
"""UTF-8 bytes of text that are encoded at a time."""


def encode_part(tokenizer: Tokenizer, part: Path, shard: Path) -> None:
    """Tokenize one spool part into one shard."""
    with ShardWriter(shard, tokenizer.vocab_size, tokenizer.eos_id) as writer:
        names: list[str] = []
        texts: list[str] = []
        sizes: list[int] = []

        def flush() -> None:
            for name, tokens, size in zip(names, tokenizer.encode_batch(texts), sizes, strict=True):
                writer.add(name, tokens, size)
            del names[:], texts[:], sizes[:]

        for document in read_part(part):
            names.append(document.id)
            texts.append(document.text)
            sizes.append(len(document.text.encode()))
            if sum(sizes) >= _BATCH_BYTES:
                flush()
        if texts:
            flush()


class _Worker:
    """One worker process and its pipe."""

    def __init__(self, tokenizer: Path) -> None:
        source_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (source_root, os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from trimtab.data.encode_worker import main; main()", str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, part: Path, shard: Path) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([str(part), str(shard)]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise RunError(
                f"A tokenizing process died (exit code {code}; out of memory?): nothing is lost, start again, "
                f"with a smaller data.num_workers if it repeats."
            )
        reply = json.loads(answer)
        if "errno" in reply:
            raise storage_error(OSError(reply["errno"], reply["text"]), shard)

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def encode_parts(
    tokenizer: Tokenizer, saved: Path, jobs: Sequence[tuple[Path, Path]], num_workers: int, done: Callable[[int], None]
) -> None:
    """Tokenize all (part, shard) jobs.

    Args:
        tokenizer: used in this process when `num_workers` is 1.
        saved: its `tokenizer.json`, which workers load.
        jobs: spool part and the shard to write from it.
        num_workers: processes; 1 works in this process.
        done: called with the number of a job when it is complete, from the calling thread.
    """
    if num_workers <= 1 or len(jobs) <= 1:
        for number, (part, shard) in enumerate(jobs):
            encode_part(tokenizer, part, shard)
            done(number)
        return
    workers = [_Worker(saved) for _ in range(min(num_workers, len(jobs)))]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)
    stopping = threading.Event()

    def drive(worker: _Worker) -> None:
        try:
            while not stopping.is_set():
                number = waiting.get_nowait()
                worker.encode(*jobs[number])
                finished.put(number)
        except queue.Empty:
            pass
        except BaseException:
            stopping.set()
            raise
        finally:
            finished.put(None)

    with ThreadPoolExecutor(len(workers)) as threads:
        try:
            futures = [threads.submit(drive, worker) for worker in workers]
            running = len(workers)
            while running:
                answer = finished.get()
                if answer is None:
                    running -= 1
                else:
                    done(answer)
            for future in futures:
                future.result()
        finally:
            stopping.set()
            for worker in workers:
                worker.stop()


def main() -> None:
    """The worker process. Ctrl-C reaches the whole process group: the parent acts on it and stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = Tokenizer.load(sys.argv[1])
    for line in sys.stdin:
        part, shard = json.loads(line)
        try:
            encode_part(tokenizer, Path(part), Path(shard))
            reply: dict[str, object] = {}
        except OSError as error:
            reply = {"errno": error.errno or 0, "text": error.strerror or str(error)}
        try:
            print(json.dumps(reply), flush=True)
        except BrokenPipeError:  # the parent is gone
            os._exit(1)


if __name__ == "__main__":
    main()
