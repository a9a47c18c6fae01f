"""The timer: seconds, each kind of error as a value, the database in front, worker restarts."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm
from cost_kernels import SCHEDULE, FakeKernel, add, endless, far_read, gather, matmul, quotient

from rlflow_tvm.cost import KernelDatabase, KernelTimer, Measurement, bench, target_key, worker_process
from rlflow_tvm.cost.bench import ENTRY
from rlflow_tvm.cost.machine import cores, cpu_model
from rlflow_tvm.cost.place import LinkError
from rlflow_tvm.cost.rehearsal import Step
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.cost.stage import Stage
from rlflow_tvm.cost.worker import _Worker
from rlflow_tvm.cost.worker_process import WorkerKilledError, WorkerProcess
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import as_target


@pytest.mark.parametrize(
    "func",
    [
        add(3, 5),
        add(),
        add(2, 2, dtype="int8"),
        add(2, 2, dtype="float16"),
        add(2, 2, dtype="bfloat16"),
        matmul(4, 8, 16),
        gather(3, 4, 5),
    ],
    ids=["add", "scalar", "int8", "float16", "bfloat16", "matmul", "gather"],
)
def test_seconds(timer, func):
    (measurement,) = timer.measure([FakeKernel(func, f"seconds{tvm.ir.save_json(func)}")])
    assert measurement.error is None
    assert measurement.run_secs > 0
    assert 1 <= measurement.repeats <= 50
    assert measurement.spread >= 0


def test_errors_are_values_and_do_not_spoil_the_next(target):
    with KernelTimer(target, timeout_secs=4.0, schedule=SCHEDULE) as timer:
        kernels = [FakeKernel(f, name) for name, f in [("crash", far_read()), ("hang", endless), ("good", add(4))]]
        crash, hang, good = timer.measure(kernels)
        assert (crash.error_kind, crash.error) == ("crash", "the worker died of SIGSEGV")
        assert (hang.error_kind, hang.run_secs) == ("timeout", None)
        assert "4 s" in hang.error
        assert good.ok
        assert timer.measured == 3


@pytest.mark.parametrize("how", ["alone", "in a graph"])
def test_integers_can_be_divided(timer, how):
    """By zero the worker would die."""
    kernels = [
        FakeKernel(quotient(tvm.tirx.truncdiv, n, dtype=dtype), f"quotient{n} {dtype}")
        for n, dtype in ((1, "int64"), (4, "int64"), (4, "float32"))
    ]
    steps = tuple(Step(kernel.func, kernel.key, "", (0, i, 9)) for i, kernel in enumerate(kernels))
    measured = timer.measure(kernels, None, (lambda: steps) if how == "in a graph" else None)
    assert [measurement.error for measurement in measured] == [None] * 3


def test_a_kernel_with_more_unit_axes_is_the_same_kernel(timer):
    """It has the same key, is built once, and takes other arguments."""
    for func, cold in ((add(1, 50, 33), "000"), (add(50, 33), "111")):
        (measured,) = timer.measure([FakeKernel(func, "unit axes", cold)])
        assert measured.error is None


def test_build_error(target):
    with KernelTimer(target, schedule="cost_kernels:refuse") as timer:
        (measurement,) = timer.measure([FakeKernel(add(4), "k")])
    assert measurement.error_kind == "build"
    assert measurement.error == "ValueError: no schedule for 3 parameters on llvm"


def test_run_error(timer):
    n = tvm.tirx.Var("n", "int64")
    a = tvm.te.placeholder((n,), name="a")
    func = tvm.te.create_prim_func([a, tvm.te.compute((n,), lambda i: a[i] + 1.0)])
    (measurement,) = timer.measure([FakeKernel(func, "symbolic")])
    assert measurement.error_kind == "run"
    assert "static shapes" in measurement.error


@pytest.mark.parametrize("op", ["build", "measure"])
def test_a_kernel_that_does_not_run_is_not_kept(op):
    """It would stop each graph that it is in."""

    def raising(*_):
        raise RuntimeError("it cannot")

    bench = SimpleNamespace(build=lambda _: {ENTRY: raising}, arguments=lambda _: [], time=raising)
    worker = object.__new__(_Worker)
    worker.bench, worker.stage = bench, Stage(bench)
    request = {"op": op, "key": "k", "func": tvm.ir.save_json(add(4)), "cold": "", "usual_secs": None}
    assert worker._answer(request)["error_kind"] == "run"
    assert worker.stage.missing(["k"]) == ["k"]


def test_unusable_schedule(target):
    with KernelTimer(target, schedule="cost_kernels:absent") as timer, pytest.raises(CostError, match="absent"):
        timer.measure([FakeKernel(add(4), "k")])


def test_order_progress_and_equal_kernels(timer):
    before = timer.measured
    a, b = FakeKernel(add(7), "order-a"), FakeKernel(matmul(3, 3, 3), "order-b")
    calls = []
    first = timer.measure([a, b, a], lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
    assert first[0] is first[2]
    assert timer.measure([b, a]) == [first[1], first[0]]
    assert timer.measured - before == 2


def test_database_is_asked_first_and_errors_are_kept(target, tmp_path):
    kernels = [FakeKernel(add(4), "good"), FakeKernel(far_read(), "bad")]
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        with KernelTimer(target, database, schedule=SCHEDULE) as timer:
            measured = timer.measure(kernels)
            assert timer.measuring_secs > 0.0
        assert database.get("good", target_key(target), timer.version) == measured[0]
        with KernelTimer(target, database, schedule=SCHEDULE) as timer:
            assert timer.measure(kernels) == measured
            assert (timer.measured, timer.measuring_secs) == (0, 0.0)
        other = KernelTimer(tvm.target.Target({"kind": "llvm", "num-cores": 1}), database, schedule=SCHEDULE)
        assert other.lookup(kernels[0]) is None
        assert KernelTimer(target, database, schedule=SCHEDULE, version="2").lookup(kernels[0]) is None


def test_launch_overhead(target):
    with KernelDatabase(":memory:") as database:
        with KernelTimer(target, database, schedule=SCHEDULE) as timer:
            secs = timer.launch_secs()
        assert 0 < secs < 1e-3  # a plausibility bound, three orders above what a slow machine takes
        assert len(database) == 1
        assert database.get(LAUNCH_KEY, target_key(target), ONCE_VERSION).run_secs == secs
        assert KernelTimer(target, database, schedule=SCHEDULE).launch_secs() == secs


@pytest.mark.parametrize("how", ["alone", "in a graph", "for once"])
def test_times_are_reckoned_to_the_usual_speed(target, how):
    """Where the reference kernel took a second when the database was begun, and where a hundred-thousandth."""
    kernels, found = [FakeKernel(add(256, 256), f"k{number}") for number in range(5)], []
    for usual_secs in (1.0, 1e-5):
        with KernelDatabase(":memory:") as database, KernelTimer(target, database, schedule=SCHEDULE) as timer:
            usual = Measurement(run_secs=usual_secs, repeats=7)
            database.put(REFERENCE_KEY, timer.target_key, ONCE_VERSION, usual)
            times = []
            for kernel in kernels:
                steps = (Step(kernel.func, kernel.key, "", (0, 1, 2)),)
                if how == "for once":
                    times.append(timer.time(kernel.func))
                else:
                    times += timer.measure([kernel], None, (lambda s=steps: s) if how == "in a graph" else None)
            found.append(sorted(times, key=lambda each: each.run_secs)[2])  # two may be disturbed by what else runs
            assert database.get(REFERENCE_KEY, timer.target_key, ONCE_VERSION) == usual
    slow, fast = (each.run_secs for each in found)
    # 2.8, but for what the machine does meanwhile: twice as slow, and twice as fast, is the most
    assert 1.5 * fast < slow < 6 * fast
    assert found[0].slowdown < found[1].slowdown


def test_all_times_of_a_database_are_reckoned_to_one_reference(target, tmp_path):
    """Somebody calls `cost forget` while a search measures, and another search may find a reference of its own."""
    path, disturbed = tmp_path / "k.sqlite", Measurement(run_secs=1e-3, repeats=7, slowdown=2.0)
    kernels = [FakeKernel(add(16, 16), f"k{number}") for number in range(3)]
    with KernelDatabase(path) as database, KernelTimer(target, database, schedule=SCHEDULE) as timer:
        database.put(REFERENCE_KEY, timer.target_key, ONCE_VERSION, disturbed)
        timer.measure(kernels[:1])
        with KernelDatabase(path) as other:
            assert other.forget_disturbed() == 2
            timer.measure(kernels[1:2])
            assert other.get(REFERENCE_KEY, timer.target_key, ONCE_VERSION) == disturbed
            other.forget_disturbed()
            other.put(REFERENCE_KEY, timer.target_key, ONCE_VERSION, Measurement(run_secs=1e-4, repeats=7))
            with pytest.raises(CostError, match=r"was measured anew while this ran .* start it again"):
                timer.measure(kernels[2:])
            assert other.get("k2", timer.target_key, timer.version) is None


def test_worker_has_its_threads_and_no_torch(target):
    with KernelTimer(target, schedule="cost_kernels:show_environment") as timer:
        (measurement,) = timer.measure([FakeKernel(add(4), "k")])
    assert measurement.error == "ValueError: TVM_NUM_THREADS=2 OMP_NUM_THREADS=1 torch=None"


def test_a_killed_worker_is_replaced(target):
    with KernelTimer(target, schedule=SCHEDULE) as timer:
        assert timer.measure([FakeKernel(add(4), "a")])[0].ok
        process = timer._workers._worker.process._process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert timer.measure([FakeKernel(add(5), "b")])[0].ok


def test_a_worker_that_is_killed_is_no_property_of_the_kernel(target, tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        with KernelTimer(target, database, schedule="cost_kernels:kill") as timer:
            (measurement,) = timer.measure([FakeKernel(add(4), "a")])
            assert measurement.error_kind == "crash"
            assert "SIGKILL" in measurement.error
            version = timer.version
        assert database.get("a", target_key(target), version) is None


@pytest.mark.parametrize("in_graph", [False, True], ids=["alone", "in a graph"])
def test_what_a_worker_dies_of_may_be_an_earlier_kernel(target, in_graph):
    """Another one has a try."""
    with KernelDatabase(":memory:") as database:
        with KernelTimer(target, database, schedule="cost_kernels:abort_later") as timer:
            for kernel in (FakeKernel(add(4), "a"), FakeKernel(add(5), "b")):
                steps = (Step(kernel.func, kernel.key, "", (0, 1, 2)),)
                (measurement,) = timer.measure([kernel], None, (lambda s=steps: s) if in_graph else None)
                assert measurement.ok


@pytest.mark.parametrize(
    ("number", "killed"),
    [
        (signal.SIGKILL, True),
        (signal.SIGTERM, True),
        (signal.SIGINT, True),
        (signal.SIGHUP, True),
        (signal.SIGXCPU, True),
        (signal.SIGSEGV, False),
        (signal.SIGABRT, False),
    ],
)
def test_a_signal_from_outside_is_told_apart(number, killed):
    worker = WorkerProcess("nothing", 1)
    worker._process = SimpleNamespace(wait=lambda timeout: -number)
    assert isinstance(worker._death(), WorkerKilledError) == killed
    assert number.name in str(worker._death())


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (MemoryError(), True),
        (OSError(28, "No space left on device"), True),
        (LinkError("kernels cannot be linked"), True),
        (RuntimeError("Check failed: CUDA: out of memory\n"), True),
        (RuntimeError("cuModuleLoadData failed with error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("std::bad_alloc"), True),
        (ValueError("no schedule"), False),
        (CostError("a parameter of no fixed shape"), False),
    ],
)
def test_what_the_machine_was_short_of_is_no_property_of_the_kernel(error, passing):
    def fails():
        raise error

    worker = object.__new__(_Worker)
    worker.bench = SimpleNamespace(launch=fails)
    answer = worker._answer({"op": "launch"})
    assert answer["error_kind"] == "build"
    assert answer.get("passing", False) == passing


def test_no_room_for_a_worker(target, monkeypatch, tmp_path):
    """Not its kernels' fault, nor the interpreter's."""
    with KernelTimer(target, schedule=SCHEDULE) as timer:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(CostError, match=r"temporary files cannot be written .*TMPDIR"):
            timer.time(add(4))
        monkeypatch.undo()

        def none_left():
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(worker_process, "Pipe", none_left)
        with pytest.raises(CostError, match=r"did not start .*Too many open files.*ulimit"):
            timer.time(add(4))


def test_a_target_that_this_machine_cannot_run():
    other = "aarch64-linux-gnu" if platform.machine() == "x86_64" else "x86_64-linux-gnu"
    target = tvm.target.Target({"kind": "llvm", "mtriple": other, "num-cores": 1})
    with KernelTimer(target) as timer, pytest.raises(CostError, match=r"this machine cannot run .*--rpc") as raised:
        timer.time(add(4))
    assert "\n" not in str(raised.value)


def test_a_timeout_has_a_second_try(target, tmp_path, monkeypatch):
    monkeypatch.setenv("COST_TEST_MARK", str(tmp_path / "mark"))
    with KernelTimer(target, timeout_secs=4.0, schedule="cost_kernels:hang_once") as timer:
        assert timer.measure([FakeKernel(add(4), "a")])[0].ok


def test_a_launch_that_cannot_be_measured_is_tried_again(target, monkeypatch):
    with KernelTimer(target, schedule=SCHEDULE) as timer:
        answers = [{"error": "noise", "error_kind": "run"}, {"run_secs": 1e-6}]
        monkeypatch.setattr(timer, "_answer", lambda *_: answers.pop(0))
        with pytest.raises(CostError, match="noise"):
            timer.launch_secs()
        assert timer.launch_secs() == 1e-6


def test_negative_launches_are_noise():
    rounds = [[-1.0, -2.0, 3.0], [-1.0, 4.0], [-5.0]]
    assert bench._launch_samples(lambda: rounds.pop(0)) == [3.0, 4.0]
    rounds = [[-1.0, -2.0], [1.0, 2.0, 3.0]]
    assert bench._launch_samples(lambda: rounds.pop(0)) == [-1.0, -2.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kernel", ["add(4)", "endless"], ids=["idle", "hanging"])
def test_no_worker_is_left_behind(kernel):
    """The parent is killed -9: an idle worker sees the closed connection, a hanging one has its own alarm."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import tvm\n"
        "from cost_kernels import *\n"
        "from rlflow_tvm.cost import KernelTimer\n"
        "target = tvm.target.Target({'kind': 'llvm', 'num-cores': 1})\n"
        "timer = KernelTimer(target, schedule=SCHEDULE, timeout_secs=2.0)\n"
        "timer.measure([FakeKernel(add(5), 'first')])\n"
        "print(timer._workers._worker.process._process.pid, flush=True)\n"
        f"timer.measure([FakeKernel({kernel}, 'second')])\n"
        "print('measured', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    if kernel == "endless":
        time.sleep(0.5)  # let the kernel start; the outcome is the same if it has not
    else:
        assert parent.stdout.readline() == "measured\n"
    parent.kill()
    parent.communicate()
    for _ in range(300):
        status = Path(f"/proc/{worker}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"worker {worker} outlives its parent")


def test_target_key():
    one = tvm.target.Target({"kind": "llvm", "mcpu": "znver4", "mattr": ["+avx2", "+fma"], "num-cores": 2})
    same = tvm.target.Target({"kind": "llvm", "num-cores": 2, "mattr": ["+fma", "+avx2"], "mcpu": "znver4"})
    assert target_key(one) == target_key(same)
    assert cpu_model() in target_key(one)
    changes = {"num-cores": 4}, {"mcpu": "znver3"}, {"mattr": ["+fma"]}, {"opt-level": 0}
    for change in (*changes, {"fast-math": True}, {"fast-math-reassoc": True}, {"vector-width": 256}):
        fields = {"kind": "llvm", "mcpu": "znver4", "mattr": ["+avx2", "+fma"], "num-cores": 2, **change}
        assert target_key(tvm.target.Target(fields)) != target_key(one)


def test_a_target_has_the_key_that_it_had_where_it_sets_nothing_unusual():
    fields = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
    plain = target_key(tvm.target.Target(fields), "board")
    assert plain == "kind=llvm;mcpu=znver4;num-cores=2;host=rpc:board"
    assert target_key(tvm.target.Target({**fields, "fast-math": False}), "board") == plain
    gpu = {"kind": "cuda", "arch": "sm_90"}
    assert target_key(as_target(gpu), "board") == "kind=cuda;arch=sm_90;host=rpc:board"
    assert target_key(as_target({**gpu, "max_threads_per_block": 1024}), "board") == target_key(as_target(gpu), "board")
    large = target_key(as_target({**gpu, "max_shared_memory_per_block": 96 * 1024}), "board")
    assert large == "kind=cuda;arch=sm_90;max_shared_memory_per_block=98304;host=rpc:board"


def test_times_of_some_processors_are_not_those_of_all(monkeypatch, tmp_path):
    """As under taskset, or on a smaller machine with such processors."""
    bare, told = tvm.target.Target("llvm"), tvm.target.Target({"kind": "llvm", "num-cores": 4})
    monkeypatch.setattr("rlflow_tvm.processors._CONTROL_GROUP", tmp_path)  # where none bounds them
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2, 3}, raising=False)
    before, told_before = target_key(bare), target_key(told)
    assert f"num-cores={cores(bare)};" in before
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0}, raising=False)
    assert f"num-cores={cores(bare)};" in target_key(bare)
    assert target_key(bare) == before.replace("num-cores=4;", "num-cores=1;")
    assert target_key(told) == told_before
    one = target_key(bare)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert target_key(bare) == one != before


def test_cores():
    assert cores(tvm.target.Target({"kind": "llvm", "num-cores": 3})) == 3
    assert cores(tvm.target.Target("llvm")) >= 1
