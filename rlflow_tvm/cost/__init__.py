"""What a graph costs: kernels measured in a worker process, kept in a database, summed over the graph."""

from __future__ import annotations

from rlflow_tvm.cost.candidate import Candidate, check_linker, export_library, link_library
from rlflow_tvm.cost.choices import MeasuredChoice
from rlflow_tvm.cost.database import KernelDatabase, default_path
from rlflow_tvm.cost.end_to_end import EndToEnd, Runners, measure_interleaved, measure_module
from rlflow_tvm.cost.estimator import MEASURED, PredictionPolicy
from rlflow_tvm.cost.graph_cost import CostModel, GraphCost, graph_cost
from rlflow_tvm.cost.learned import LEAST_SAMPLES, LearnedCost, Prediction, Sample
from rlflow_tvm.cost.machine import check_remote, cpu_model, target_key
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.metrics import kernel_bytes, kernel_flops
from rlflow_tvm.cost.quiet import QuietMachine
from rlflow_tvm.cost.ratio import LEAST_ROUNDS, Ratio, ratio_json
from rlflow_tvm.cost.roofline import Roofline, export_peak, measure_roofline, peak_flops
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.scratch import scratch_folder
from rlflow_tvm.cost.temperature import Temperatures
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.cost.tuned import TunedSchedules
from rlflow_tvm.cost.tuning import LEAST_TRIALS, Tuned, tune

__all__ = [
    "LEAST_ROUNDS",
    "LEAST_SAMPLES",
    "LEAST_TRIALS",
    "MEASURED",
    "Candidate",
    "CostModel",
    "EndToEnd",
    "GraphCost",
    "KernelDatabase",
    "KernelTimer",
    "LearnedCost",
    "MeasuredChoice",
    "Measurement",
    "Prediction",
    "PredictionPolicy",
    "QuietMachine",
    "Ratio",
    "Roofline",
    "RpcDevices",
    "Runners",
    "Sample",
    "Temperatures",
    "Tuned",
    "TunedSchedules",
    "cpu_model",
    "default_path",
    "check_linker",
    "check_remote",
    "export_library",
    "export_peak",
    "graph_cost",
    "kernel_bytes",
    "kernel_flops",
    "link_library",
    "measure_interleaved",
    "measure_module",
    "measure_roofline",
    "peak_flops",
    "ratio_json",
    "scratch_folder",
    "target_key",
    "tune",
]
