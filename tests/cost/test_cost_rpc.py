"""Measuring through TVM's own tracker and servers, two of them on this machine, each in processes of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import tvm
from cost_kernels import SCHEDULE, FakeKernel, add, endless, far_read, gather, matmul
from onnx import TensorProto, helper
from rpc_farm import Farm, free_port
from tvm.rpc import base

from rlflow_tvm.cli import parse_rpc
from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement, RpcDevices, target_key, worker
from rlflow_tvm.cost.bench import Bench
from rlflow_tvm.cost.caches import SentCaches
from rlflow_tvm.cost.kernel_worker import KernelWorker
from rlflow_tvm.cost.machine import cpu_model
from rlflow_tvm.cost.place import LinkError, linked
from rlflow_tvm.cost.remote import _Jobs, _Slot
from rlflow_tvm.cost.schema import ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.cost.session import Session, SessionLostError
from rlflow_tvm.errors import CostError, UsageError
from tests.command_process import run_command

KERNELS = [FakeKernel(add(16, i), f"add{i}", "031"[i % 3] * 3) for i in range(1, 7)]


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """Two servers that outlive the tests, and two that are killed."""
    with Farm(tmp_path_factory.mktemp("farm"), pair=2, doomed=2) as farm:
        yield farm


@pytest.fixture
def timer(farm, target):
    with KernelTimer(target, timeout_secs=30.0, schedule=SCHEDULE, remote=farm.devices("pair")) as timer:
        yield timer


def free(devices: RpcDevices) -> int:
    """How many of the servers nobody uses."""
    with devices._tracker(5.0) as tracker:
        base.sendjson(tracker, [base.TrackerCode.SUMMARY])
        return base.recvjson(tracker)[1]["queue_info"][devices.key]["free"]


def know_reference(database, target, key):
    """So that no server is asked for it first, and is ahead of the others with the kernels."""
    reference = Measurement(run_secs=1e-4, repeats=7)
    database.put(REFERENCE_KEY, target_key(target, key), ONCE_VERSION, reference)


def test_all_servers_measure_and_rows_are_of_their_key(farm, target, tmp_path):
    devices, progress = farm.devices("pair"), []
    before = [server.count("load_module") for server in farm.servers["pair"]]
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        know_reference(database, target, "pair")
        with KernelTimer(target, database, schedule=SCHEDULE, remote=devices) as timer:
            measured = timer.measure(KERNELS, lambda *counts: progress.append(counts))
            assert timer.measured == len(KERNELS) == len(database) - 1  # and the reference
            assert timer.measure(KERNELS[::-1]) == measured[::-1]
            assert timer.measured == len(KERNELS)
        assert progress == [(done, len(KERNELS)) for done in range(1, len(KERNELS) + 1)]
        for kernel, measurement in zip(KERNELS, measured, strict=True):
            assert measurement.error is None
            assert 0 < measurement.run_secs < 0.1  # plausible: a millisecond at most, on any machine
            assert measurement.repeats >= 7
            assert measurement.slowdown > 0
            key = f"{kernel.key}/{kernel.cold}"
            assert database.get(key, target_key(target, "pair"), timer.version) == measurement
        assert "host=rpc:pair" in timer.target_key
        assert cpu_model() not in timer.target_key
        assert KernelTimer(target, database, schedule=SCHEDULE).lookup(KERNELS[0]) is None
        other = RpcDevices(devices.host, devices.port, "other")
        assert KernelTimer(target, database, schedule=SCHEDULE, remote=other).lookup(KERNELS[0]) is None
    served = [server.count("load_module") - old for server, old in zip(farm.servers["pair"], before, strict=True)]
    assert min(served) > 2  # the helpers and the reference, and at least one kernel
    assert sum(served) == 2 * 2 + len(KERNELS)


def test_everything_else_a_timer_does(timer, target):
    assert 0 < timer.launch_secs() < 1e-3  # a plausibility bound
    assert timer.difference(matmul(4, 8, 16), matmul(4, 8, 16)) == 0.0
    assert timer.difference(add(4), matmul(2, 2, 1)) is None
    assert timer.time(gather(3, 4, 5)).ok
    symbolic = tvm.te.placeholder((tvm.tirx.Var("n", "int64"),), name="a")
    func = tvm.te.create_prim_func([symbolic, tvm.te.compute(symbolic.shape, lambda i: symbolic[i] + 1.0)])
    assert timer.time(func).error_kind == "run"
    with pytest.raises(CostError, match="are not timed on RPC machines"):
        CostModel(target, timer=timer).end_to_end(tvm.IRModule())


def test_what_a_kernel_does_to_a_session_no_server_dies_of(farm, target, caplog):
    devices = farm.devices("pair")
    with KernelTimer(target, timeout_secs=3.0, schedule=SCHEDULE, remote=devices) as timer:
        kernels = [FakeKernel(f, name) for name, f in [("crash", far_read()), ("hang", endless), ("good", add(4))]]
        crash, hang, good = timer.measure(kernels)
        assert (crash.error_kind, crash.run_secs) == ("crash", None)
        assert "sessions of two servers" in crash.error
        assert (hang.error_kind, hang.run_secs) == ("timeout", None)
        assert good.ok
        assert timer.measured == 3
    assert caplog.text.count("a server was lost") == 2
    farm.wait(lambda: devices.servers() == 2, "2 servers")  # one that registers anew is not listed for an instant
    farm.wait(lambda: free(devices) == 2, "2 free servers")  # the hanging kernel has been ended there, too


def test_a_server_is_killed_and_then_the_last(farm, target, tmp_path, monkeypatch, caplog):
    devices = farm.devices("doomed", wait_secs=2.0)
    first, last = farm.servers["doomed"]
    more = [FakeKernel(add(17, i), f"more{i}") for i in range(1, 5)]
    puts, progress = Counter(), []
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        know_reference(database, target, "doomed")
        put = database.put

        def counted(key, *values):
            puts[key] += 1
            put(key, *values)

        monkeypatch.setattr(database, "put", counted)

        def kill_first(done, total):
            progress.append((done, total))
            if done == 3:
                assert first.count("connected") == 1
                assert first.count("finish serving") == 0
                first.kill()

        with KernelTimer(target, database, schedule=SCHEDULE, remote=devices) as timer:
            measured = timer.measure(KERNELS, kill_first)
            assert all(measurement.ok for measurement in measured)
            assert timer.measured == len(KERNELS) == len(database) - 1  # and the reference
            assert progress == [(done, len(KERNELS)) for done in range(1, len(KERNELS) + 1)]
            assert set(puts.values()) == {1}
            assert devices.servers() == 1

            with pytest.raises(CostError, match=r"no server .* under key 'doomed' for 2 s .*tvm\.exec\.rpc_server"):
                timer.measure(more, lambda done, total: last.kill() if done == 2 else None)
            kept = timer.measured - len(KERNELS)
            assert 2 <= kept < len(more)
            assert len(database) == len(KERNELS) + kept + 1
            assert [r.levelno for r in caplog.records if "no server" in r.message] == [logging.WARNING]

            farm.add("doomed")
            timer.remote = RpcDevices(devices.host, devices.port, "doomed", 60.0)
            timer._workers._devices = timer.remote
            assert all(measurement.ok for measurement in timer.measure(more))
            assert timer.measured == len(KERNELS) + len(more) == len(database) - 1
            assert set(puts.values()) == {1}


def test_operands_are_prepared_on_the_server(farm, target):
    """In a session of this process: the helpers there count the calls, which leave values as they are."""
    with closing(_Dropped(Session(farm.devices("pair"), target, 10.0))) as held:
        session = held.session
        bench = Bench(target, lambda func, _: func, session, SentCaches(target, session.helpers))
        func = matmul(64, 64, 64)
        built = bench.build(func)
        before = session.helpers["prepared"]()
        found = bench.time(func, built, "031")
        assert session.helpers["prepared"]() - before == found["repeats"] > 1
        arrays = [np.random.default_rng(0).standard_normal((n, 33)).astype("float32") for n in (1, 40)]
        tensors = [tvm.runtime.tensor(array, session.device) for array in arrays]
        session.helpers["cold"](0, 1)
        prepare = session._session.get_function("rlflow_tvm.prepare_caches")
        prepare(*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        session.check(1.0)
        farm.wait(lambda: _ended(session), "the session's end")


class _Dropped:
    """Holds a session, which ends when nobody does."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def close(self) -> None:
        del self.session


def _ended(session: Session) -> bool:
    time.sleep(1.5)  # not asked within its second
    try:
        session.check(1.0)
    except SessionLostError:
        return True
    return False


def test_wrong_key(farm, target, caplog):
    with KernelTimer(target, schedule=SCHEDULE, remote=farm.devices("nobody", wait_secs=1.0)) as timer:
        with pytest.raises(CostError, match=r"no server .* under key 'nobody' for 1 s"):
            timer.measure(KERNELS[:1])
        assert timer.measured == 0
    assert caplog.text.count("waiting up to 1 s") == 1


def test_no_tracker(target):
    devices = RpcDevices("127.0.0.1", free_port(), "pair")
    with KernelTimer(target, schedule=SCHEDULE, remote=devices) as timer:
        with pytest.raises(CostError, match=rf"no RPC tracker at 127.0.0.1:{devices.port} .*rpc_tracker"):
            timer.measure(KERNELS[:1])


@pytest.mark.parametrize("host", ["board..local", "x" * 64])
def test_a_name_that_no_host_has(host, target):
    with KernelTimer(target, schedule=SCHEDULE, remote=RpcDevices(host, 9190, "pair")) as timer:
        with pytest.raises(CostError, match=f"no RPC tracker at {host}:9190 .*mend the address"):
            timer.measure(KERNELS[:1])


@pytest.mark.parametrize("maker", [KernelTimer, CostModel])
@pytest.mark.parametrize("target", [tvm.target.Target("llvm"), "llvm", {"kind": "llvm", "mcpu": "generic"}], ids=str)
def test_a_target_must_say_how_many_cores(maker, target):
    with pytest.raises(CostError, match='"num-cores"'):
        maker(target, remote=RpcDevices("localhost", 9190, "pair"))


def test_a_gpus_kernels_are_compiled_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, {"kind": "llvm", "num-cores": 2})
    with pytest.raises(CostError, match="no nvcc to compile"):
        KernelTimer(target, remote=RpcDevices("localhost", 9190, "pair"))


def test_what_cannot_be_linked_here_names_the_compiler(target, monkeypatch, tmp_path):
    executable = tvm.compile(add(4), target=target)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LinkError, match=r"no-such-compiler.* CXX"):
        linked(executable)
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkError, match=r"install a C\+\+ compiler"):
        linked(executable)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Compilation error:\nld: no space left on device\n\nCommand line: g++ -shared -o x.so", "no space left"),
        ("", "RuntimeError"),
    ],
)
def test_what_the_linker_said_is_told(target, monkeypatch, text, told):
    def fails(self, *_arguments, **_options):
        raise RuntimeError(text)

    executable = tvm.compile(add(4), target=target)
    monkeypatch.setattr(type(executable), "export_library", fails)
    with pytest.raises(LinkError, match=told):
        linked(executable)


def test_what_cannot_be_linked_here_is_no_missing_server(target, monkeypatch):
    """Nobody waits for one, or is told to start one."""

    def unlinked(*_arguments):
        raise LinkError("name another in CXX")

    monkeypatch.setattr(worker, "Session", unlinked)
    made = object.__new__(worker._Worker)
    made.remote, made.target, made.session = RpcDevices("localhost", 9190, "pair"), target, None
    asked = SimpleNamespace(call=lambda request, _limit: made.open(request["wait_secs"]))
    jobs = _Jobs([{"op": "measure"}], 1.0, 1)
    slot = _Slot(asked, "pair")
    slot.begin(jobs)
    with pytest.raises(CostError, match="name another in CXX"):
        jobs.next_answer(lambda: None)
    slot.end(whole=True)
    assert not slot.waits_for_server


def test_a_server_that_was_given_back_is_lost_to_a_request():
    """Which is then made again with another, where none is to blame; the machine was slow to make it."""
    made = object.__new__(worker._Worker)
    made.remote, made.session, made.bench = RpcDevices("localhost", 9190, "pair"), None, None
    answer = made.answer({"op": "measure", "limit_secs": 1.0})
    assert "nothing to do" in answer["lost"]
    asked = object.__new__(KernelWorker)
    asked.process = SimpleNamespace(running=True, call=lambda *_: answer)
    assert asked.attempt({"op": "measure"}, 1.0)[0] == "lost"


def test_options():
    assert parse_rpc(None, None) is None
    assert parse_rpc("host.lan:9190", "board") == RpcDevices("host.lan", 9190, "board")
    for address, key in [("host:9190", None), (None, "board"), ("host:9190", "")]:
        with pytest.raises(UsageError, match="go together"):
            parse_rpc(address, key)
    for address in ("host", "host:", ":9190", "host:port", "host:99999"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            parse_rpc(address, "board")


def command(home, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RLFLOW_TVM_HOME": str(home), "COLUMNS": "200"}
    return run_command("rlflow_tvm.optimize", list(map(str, arguments)), environment, 120.0)


def turned_twice(path):
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Transpose", ["t"], ["u"], perm=[1, 0]),
        helper.make_node("Relu", ["u"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [256, 256]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 17)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_command_searches_with_remote_times(farm, tmp_path):
    model, figures = turned_twice(tmp_path / "m.onnx"), tmp_path / "f.json"
    done = command(tmp_path, model, "--rpc", f"127.0.0.1:{farm.port}", "--rpc-key", "pair", "--json", figures)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["rpc_key"] == "pair"
    assert found["kernels_measured"] > 0
    with KernelDatabase(tmp_path / "kernels.sqlite") as database:
        assert {target.rpartition("host=")[2] for (target,) in database.rows(["target"])} == {"rpc:pair"}


def test_command_without_a_tracker(tmp_path):
    port = free_port()
    done = command(tmp_path, turned_twice(tmp_path / "m.onnx"), "--rpc", f"127.0.0.1:{port}", "--rpc-key", "pair")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"127.0.0.1:{port}" in line
    assert "Traceback" not in done.stderr
