"""One candidate's side of an end-to-end comparison: a model loaded and called in bursts, in a process of its own.

Requests are JSON objects with an "op":
- "load": `kind` ("tvm": shared library, "onnx": for ONNX Runtime, "torch": exported program for torch.compile),
  `path`, `inputs` (npz), `outputs` (npz to write), `threads`. Takes the place of what was loaded before. Calls the
  model once; answers {"load_secs", "first_secs": of that call, "peak_bytes"} or {"error"}.
- "burst": `calls`, `wake`. Answers {"samples": seconds of each call, "peak_bytes"} or {"error"}; with `wake`, some more
  calls come before them, which are not timed.

"load_secs" is without importing the runtime. "peak_bytes" is the most memory that this process has held since, over
what it held, runtime imported and inputs read, before it loaded the model; null where the system does not tell.

Thread pools spin for a while after their work is done, for speed; here they would take the next candidate's
cores. They may spin within their own burst, as they do in use, and the answer is held back until they sleep
(after about 25 ms for ONNX Runtime 1.31, 50 ms for TVM 0.27, two threads each).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

# Threads that slept may be given one core together; it takes the system some milliseconds to move one away, in which
# all goes at half speed.
_WAKE_SECS = 0.03
_QUIET_STEP_SECS = 0.02
_QUIET_SHARE = 0.05  # of one core: below it the pool sleeps
_QUIET_LIMIT_SECS = 5.0

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)

Call = Callable[[], Any]
Fetch = Callable[[Any], list[np.ndarray]]


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes the connection."""
    connection.send_bytes(b"{}")
    model: tuple[Call, Fetch] | None = None
    held: int | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        answer: dict[str, Any] = {}
        try:
            if request["op"] == "load":
                model = None  # its memory is not the next one's
                model, held = _load(request, answer)
            else:
                assert model is not None, "the first request must be load"
                answer["samples"] = _burst(model[0], request["calls"], request["wake"])
            answer["peak_bytes"] = None if held is None else max(_status_bytes("VmHWM") - held, 0)
            _settle()
        except Exception as error:  # noqa: BLE001  process boundary: the parent turns it into its own error
            lines = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]}
        connection.send_bytes(json.dumps(answer).encode())


def _load(request: dict[str, Any], answer: dict[str, Any]) -> tuple[tuple[Call, Fetch], int | None]:
    """The model, and the bytes held before it was there."""
    inputs = read_arrays(Path(request["inputs"]))
    runtime, load = _RUNTIMES[request["kind"]]
    if request["kind"] == "torch" and sys.modules.get("torch", runtime) is None:
        del sys.modules["torch"]  # kept from being imported until now: see worker_process
    import_module(runtime)
    held = _held_bytes()
    started = time.perf_counter()
    call, fetch = load(request["path"], inputs, request["threads"])
    answer["load_secs"] = time.perf_counter() - started
    started = time.perf_counter()
    result = call()
    answer["first_secs"] = time.perf_counter() - started
    write_arrays(Path(request["outputs"]), fetch(result))
    return (call, fetch), held


def write_arrays(path: Path, arrays: list[np.ndarray]) -> None:
    """Arrays in their order, as one npz file."""
    # npz knows numpy's own types only: bytes, and the names of the types beside them
    plain = [a if a.dtype.isbuiltin == 1 else a.view(f"u{a.dtype.itemsize}") for a in arrays]
    np.savez(path, *plain, dtypes=np.array([a.dtype.name for a in arrays], dtype=str))


def read_arrays(path: Path) -> list[np.ndarray]:
    """What `write_arrays` wrote."""
    with np.load(path) as stored:
        names = [str(name) for name in stored["dtypes"]]
        if any(name.startswith(("bfloat", "float8")) for name in names):
            import ml_dtypes  # noqa: F401  registers these names with numpy; comes with onnx
        return [stored[f"arr_{i}"].view(np.dtype(name)) for i, name in enumerate(names)]


def _burst(call: Call, calls: int, wake: bool) -> list[float]:
    woken = time.perf_counter()
    while wake:
        call()
        wake = time.perf_counter() - woken < _WAKE_SECS
    samples = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return samples


def _settle() -> None:
    """Wait until this process, all of its threads, uses no processor time."""
    deadline = time.perf_counter() + _QUIET_LIMIT_SECS
    while time.perf_counter() < deadline:
        wall, used = time.perf_counter(), time.process_time()
        time.sleep(_QUIET_STEP_SECS)
        if time.process_time() - used < _QUIET_SHARE * (time.perf_counter() - wall):
            return
    raise RuntimeError(f"its threads were still busy {_QUIET_LIMIT_SECS:g} s after the last call")


def _held_bytes() -> int | None:
    """Bytes of memory held now, from where the peak is counted anew; None where the system cannot do that.

    `getrusage` would not do: its peak is never lower than that of the parent at the time it started this process.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return _status_bytes("VmRSS")
    except OSError:
        return None


def _status_bytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _load_tvm(path: str, inputs: list[np.ndarray], threads: int) -> tuple[Call, Fetch]:
    del threads  # TVM_NUM_THREADS has told TVM
    import tvm
    from tvm import relax

    main = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())["main"]
    arguments = [tvm.runtime.tensor(array, tvm.cpu()) for array in inputs]

    def fetch(result: Any) -> list[np.ndarray]:
        if isinstance(result, tvm.runtime.Tensor):
            return [result.numpy()]
        return [array for field in result for array in fetch(field)]

    return (lambda: main(*arguments)), fetch


def _load_onnx(path: str, inputs: list[np.ndarray], threads: int) -> tuple[Call, Fetch]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]
    if len(names) != len(inputs):
        raise ValueError(f"the model has {len(names)} inputs ({', '.join(names)}), {len(inputs)} arrays were given")
    feed = dict(zip(names, inputs, strict=True))
    return (lambda: session.run(None, feed)), list


def _load_torch(path: str, inputs: list[np.ndarray], threads: int) -> tuple[Call, Fetch]:
    import torch
    from torch._inductor import config

    torch.set_num_threads(threads)
    torch.compiler.reset()
    config.freezing = True  # weights are constants and may be packed, as in the other candidates
    program = torch.compile(torch.export.load(path).module())
    arguments = [torch.from_numpy(array) for array in inputs]

    def call() -> Any:
        with torch.no_grad():
            return program(*arguments)

    def fetch(result: Any) -> list[np.ndarray]:
        if isinstance(result, torch.Tensor):
            return [result.numpy()]
        values = result.values() if isinstance(result, dict) else result
        return [array for field in values for array in fetch(field)]

    return call, fetch


_RUNTIMES = {
    "tvm": ("tvm.relax", _load_tvm),
    "onnx": ("onnxruntime", _load_onnx),
    "torch": ("torch._inductor.config", _load_torch),
}
"""Kind -> the module to import first, and what loads a model."""
