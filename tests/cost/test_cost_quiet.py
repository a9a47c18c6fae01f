"""Measuring alone: nobody computes or measures beside it, everybody gets their turn, and the dead hold nothing."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from cost_kernels import SCHEDULE, FakeKernel, add

from rlflow_tvm.cost import KernelDatabase, KernelTimer, Measurement, QuietMachine, quiet, target_key
from rlflow_tvm.errors import CostError

PROCESS = """
import mmap, sys
sys.modules["torch"] = None  # TVM would import it, for nothing
from rlflow_tvm.cost.quiet import QuietMachine

# each process says in a byte of its own what it is at: 0 nothing, 1 computing, 2 measuring; 3 that it has finished
path, states, me, measurements = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
file = open(states, "r+b")
state = mmap.mmap(file.fileno(), 0)
others = [i for i in range(len(state)) if i != me]


def look(forbidden):
    for _ in range(50):
        assert not forbidden & {state[i] for i in others}, bytes(state)


def go(quiet):
    quiet.compute()
    state[me] = 1
    look({2})


with QuietMachine(path) as quiet:
    go(quiet)
    for _ in range(measurements):
        state[me] = 0
        with quiet.measuring():
            state[me] = 2
            look({1, 2})
            state[me] = 0
        assert quiet.computing
        state[me] = 1
        look({2})
        state[me] = 0
        go(quiet)
    while 3 not in [state[i] for i in others] and not measurements:  # always one computes: no gap for the other
        state[me] = 0
        go(quiet)
    state[me] = 0
    quiet.rest()
    state[me] = 3
"""


def test_a_long_wait_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(quiet, "_SILENT_SECS", 0.2)
    with QuietMachine(tmp_path / "lock") as one, QuietMachine(tmp_path / "lock") as other:
        one.compute()
        other.compute()  # side by side
        other.rest()
        done = threading.Event()

        def measure():
            with other.measuring():
                done.set()

        thread = threading.Thread(target=measure)
        thread.start()
        assert not done.wait(1.0)
        (told,) = caplog.messages
        assert told.startswith(f"waiting for another process that measures kernels (which locks {tmp_path}/lock.busy)")
        one.rest()
        thread.join(10)
        assert done.is_set()
        with other.measuring():
            pass
    time.sleep(0.4)
    assert len(caplog.messages) == 1  # nothing is said of a wait that has ended


@pytest.mark.timeout(120)
@pytest.mark.parametrize("measurements", [(0, 0, 60), (30, 30, 30)], ids=["one measures", "all measure"])
def test_no_measuring_overlaps_with_computing_or_measuring(tmp_path, measurements):
    states = tmp_path / "states"
    states.write_bytes(bytes(len(measurements)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "lock"), str(states), str(me), str(number)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for me, number in enumerate(measurements)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(measurements), "\n".join(errors)
    with states.open("r+b") as file, mmap.mmap(file.fileno(), 0) as state:
        assert bytes(state) == bytes([3] * len(measurements))


def test_the_dead_hold_nothing(tmp_path):
    path = tmp_path / "lock"
    program = (
        "import os, sys; sys.modules['torch'] = None\nfrom rlflow_tvm.cost.quiet import QuietMachine\n"
        "quiet = QuietMachine(sys.argv[1])\nquiet.compute()\nos.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False)
    assert done.returncode == -9
    with QuietMachine(path) as quiet, quiet.measuring():
        assert not quiet.computing


def test_an_error_while_measuring_gives_the_lock_back(tmp_path):
    with QuietMachine(tmp_path / "lock") as quiet, QuietMachine(tmp_path / "lock") as other:
        with pytest.raises(ZeroDivisionError), quiet.measuring():
            raise ZeroDivisionError
        with other.measuring():
            pass


def test_a_link_to_the_file_is_the_same_lock(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with QuietMachine(tmp_path / "link"):
        assert {path.name for path in tmp_path.iterdir()} == {"link", "lock.busy", "lock.turn"}


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refused(*_arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    with QuietMachine(tmp_path / "lock") as quiet:
        monkeypatch.setattr(fcntl, "flock", refused)
        with pytest.raises(CostError, match=r"lock\.busy cannot be locked \(No locks available\): set RLFLOW_TVM_HOME"):
            quiet.compute()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(CostError, match=r"nowhere.*set RLFLOW_TVM_HOME"):
        QuietMachine(tmp_path / "nowhere" / "lock")


def test_what_another_process_measured_meanwhile_is_taken_over(target, tmp_path):
    """And quiet is asked for only where something is to be measured."""
    entered = []
    theirs = Measurement(run_secs=1.0, repeats=7, slowdown=3.0)
    with KernelDatabase(tmp_path / "k.sqlite") as database:

        @contextmanager
        def waits():
            entered.append(True)
            database.put("first", target_key(target), "v", theirs)
            yield

        with KernelTimer(target, database, schedule=SCHEDULE, version="v", quiet=waits) as timer:
            assert timer.measure([FakeKernel(add(4), "first")]) == [theirs]
            assert timer.measure([FakeKernel(add(4), "first")]) == [theirs]
            assert timer.measured == 0
            assert len(entered) == 2  # for the reference, once for all, and for the kernel
            first, second = timer.measure([FakeKernel(add(4), "first"), FakeKernel(add(4), "second")])
            assert first == theirs
            assert second == database.get("second", target_key(target), "v")
            assert (timer.measured, len(entered)) == (1, 3)


MEASURES = """
import json, sys
sys.modules["torch"] = None  # TVM would import it, for nothing
from cost_kernels import SCHEDULE, FakeKernel, add
from tvm.target import Target
from rlflow_tvm.cost import quiet
from rlflow_tvm.cost import KernelDatabase, KernelTimer

with KernelDatabase(sys.argv[1]) as database:
    with KernelTimer(Target({"kind": "llvm", "num-cores": 1}), database, schedule=SCHEDULE) as timer:
        secs = [timer.measure([FakeKernel(add(n), str(n))])[0].run_secs for n in range(4, 10)]
        print(json.dumps([timer.launch_secs(), *secs]), timer.measured, sep="|")
"""


def test_processes_with_one_database_measure_once_for_all(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", MEASURES, str(tmp_path / "k.sqlite")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    told = [process.communicate()[0].strip().split("|") for process in processes]
    assert told[0][0] == told[1][0]  # seconds to the last digit
    assert sum(int(measured) for _, measured in told) == 6


def test_locks_that_may_only_be_read_do(tmp_path, monkeypatch):
    """As in another user's folder: what is there is locked all the same, what is not there is told."""
    with QuietMachine(tmp_path / "k.sqlite"):
        pass
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with QuietMachine(tmp_path / "k.sqlite") as quiet_machine, quiet_machine.measuring():
        pass
    with pytest.raises(CostError, match="cannot be opened"):
        QuietMachine(tmp_path / "other.sqlite")
