"""Several processes: who compiles, who waits, what edits of the source do, and what a terminal shows."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from cute_kernels.jit import cache
from cute_kernels.jit import compile as compiler

CALL = (
    "f = toy(Config(2.0), 'sm_90a'); "
    "sys.stdout.write(f\"{type(f).__name__} {toy.artifact(Config(2.0), 'sm_90a').origin}\\n\")"
)


def test_racing_processes_compile_once(toy_kernel):
    # Forked after the slow imports and before anything is compiled, so that they start within a millisecond of each other.
    code = f"""
import os, cutlass.cute
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        {CALL}
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
assert [os.waitpid(c, 0)[1] for c in children] == [0] * 5
"""
    assert toy_kernel.run(code, TOY_SLEEP="0.3").splitlines() == ["Function disk"] * 5
    assert toy_kernel.compiles == 1


def test_an_edited_source_is_compiled_by_the_next_process(toy_kernel):
    five = "0f40A00000"
    toy, config = toy_kernel.load()
    old = toy.artifact(config(2.0), "sm_90a")
    assert old.origin == "compiled" and five not in old.ptx
    toy_kernel.write_device(5.0)
    code = f"a = toy.artifact(Config(2.0), 'sm_90a'); print(a.origin, {five!r} in a.ptx, a.key)"
    origin, has_five, key = toy_kernel.run(code).split()
    assert (origin, has_five) == ("compiled", "True") and key != old.key
    assert cache.lookup(toy.name, "sm_90a", old.key), "the old text's entry stays, for whoever goes back to it"
    assert toy_kernel.compiles == 2


def lock_path(toy, config):
    made = toy.artifact(config(2.0), "sm_90a")
    entry = made.object_path.parent
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()
    return cache.root() / cache.FORMAT / "locks" / f"{made.key[:40]}.lock"


HOLD = """
import fcntl, os, sys, time
f = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(f, fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(60)
"""


def hold(path):
    process = subprocess.Popen([sys.executable, "-S", "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_of_a_dead_process_is_free(toy_kernel):
    toy, config = toy_kernel.load()
    holder = hold(lock_path(toy, config))
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    start = time.monotonic()
    assert toy.artifact(config(2.0), "sm_90a").origin == "compiled"
    assert time.monotonic() - start < 10


def test_a_held_lock_is_waited_for(toy_kernel):
    toy, config = toy_kernel.load()
    holder = hold(lock_path(toy, config))
    made = []
    waiter = threading.Thread(target=lambda: made.append(toy.artifact(config(2.0), "sm_90a")))
    waiter.start()
    time.sleep(0.5)
    assert not made and toy_kernel.compiles == 1
    holder.kill()
    holder.wait()
    waiter.join(30)
    assert made[0].origin == "compiled" and toy_kernel.compiles == 2


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(toy_kernel, monkeypatch):
    toy, config = toy_kernel.load()
    holder = hold(lock_path(toy, config))
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.2)
    try:
        with pytest.warns(RuntimeWarning, match="compiling without the lock"):
            assert toy.artifact(config(2.0), "sm_90a").origin == "compiled"
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_is_released_even_if_a_child_was_forked_meanwhile(tmp_path):
    key = "c3" * 32
    with cache.lock(key):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    try:
        descriptor = os.open(cache.root() / cache.FORMAT / "locks" / f"{key[:40]}.lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError if the child kept it
        os.close(descriptor)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- the message on a terminal -------------------------------------------------------------------------------------


def on_terminal(toy_kernel, **environment):
    """What a process writes to a terminal that is its stderr."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\nfrom {toy_kernel.package} import *\n{CALL}"]
    process = subprocess.Popen(command, stderr=slave, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the terminal's way to say that its last writer is gone
            break
        if not piece:
            break
        text += piece
    os.close(master)
    assert process.wait(60) == 0, text
    return text.decode().replace("\r", "")


def test_a_slow_compile_is_announced_once_on_a_terminal(toy_kernel, cache_folder):
    lines = on_terminal(toy_kernel, TOY_SLEEP="1.2").splitlines()
    assert len(lines) == 2, lines
    assert lines[0] == f"cute_kernels: compiling {toy_kernel.package} for sm_90a (kept in {cache_folder}) ..."
    assert lines[1].startswith(f"cute_kernels: {toy_kernel.package} for sm_90a: ") and lines[1].endswith(" s")


class Stream:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


SAID = [(1, "", 0.3, 2), (0, "", 0.3, 0), (1, "1", 0.3, 0), (1, "", 0, 0)]


@pytest.mark.parametrize(("terminal", "quiet", "seconds", "lines"), SAID)
def test_when_it_is_announced(monkeypatch, terminal, quiet, seconds, lines):
    stream = Stream(bool(terminal))
    monkeypatch.setattr(compiler.sys, "stderr", stream)
    monkeypatch.setattr(compiler, "MESSAGE_AFTER", 0.1)
    monkeypatch.setenv("CUTE_KERNELS_QUIET", quiet)
    with compiler.announced("k for sm_90a"):
        time.sleep(seconds)
    assert len(stream.text.splitlines()) == lines, stream.text
