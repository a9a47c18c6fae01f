"""Rules on compiled modules: what the matcher finds and the rewrite builds computes, in floats, what stood there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from rlflow_tvm.cost import link_library, scratch_folder
from rlflow_tvm.dataflow import canonical, variables_of
from rlflow_tvm.errors import CostError, RewriteError
from rlflow_tvm.kernels import Lowering
from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.passes.instance import instance_function
from rlflow_tvm.passes.proof.sampling import FLOAT, LANES, Sample, Sampler
from rlflow_tvm.verify import flatten

TOLERANCES = {"float32": 1e-4}
"""By element type: one rewrite of a few operators on small tensors whose elements are about 1."""

SAMPLES = 3
_ATTEMPTS = 4000
_RISKS = {
    "relax.sqrt": (0, "positive"),
    "relax.rsqrt": (0, "positive"),
    "relax.power": (0, "positive"),
    "relax.divide": (1, "nonzero"),
}
"""Operators that are not finite for every operand: which operand, and what it has to be."""
_NONZERO = frozenset(
    f"relax.{name}"
    for name in (
        *("abs", "divide", "multiply", "negative", "rsqrt", "sqrt"),
        *("broadcast_to", "expand_dims", "flatten", "permute_dims", "reshape", "squeeze"),
    )
)
"""Operators whose results are not 0 where no operand is."""
_POSITIVE = frozenset({"relax.exp", "relax.sigmoid"})


@dataclass(frozen=True)
class Pair:
    """A function before and after one rewrite of a sample."""

    sample: Sample
    before: relax.Function
    after: relax.Function

    def arguments(self, rng: np.random.Generator) -> list[np.ndarray]:
        """One array for each parameter: normal, or of magnitudes near 1 and of one sign where a root is taken of it."""
        needs = _needs(self.before)
        found = []
        for param in self.before.params:
            shape, dtype = tuple(int(extent) for extent in param.ty.shape.values), str(param.ty.dtype)
            if param.name in self.sample.instance.indices:
                array = np.asarray(rng.integers(*self.sample.instance.indices[param.name], shape), dtype)
            elif (need := needs.get(canonical(param))) is not None:
                array = np.asarray(rng.uniform(0.5, 1.5, shape), dtype)
                if need == "nonzero":
                    array = np.asarray(array * rng.choice(np.array([-1, 1], dtype), shape))  # not a number without axes
            else:
                array = np.asarray(rng.standard_normal(shape), dtype)
            found.append(array)
        return found

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.sample.dtype]


def _needs(func: relax.Function) -> dict[relax.Var, str]:
    """Variable -> "positive" or "nonzero", for what has to be one of these for all to be finite."""
    values = {canonical(binding.var): binding.value for binding in func.body.blocks[0].bindings}
    needs: dict[relax.Var, str] = {}

    def ask(var: relax.Var, need: str) -> None:
        if needs.get(var) in (need, "positive"):
            return
        needs[var] = need
        value = values.get(var, var)
        name = value.op.name if isinstance(value, relax.Call) else ""
        read = () if name in _POSITIVE or value is var else variables_of(value)
        if name == "relax.abs" or (name == "relax.multiply" and len(read) == 2 and read[0].same_as(read[1])):
            need = "nonzero"
        elif name not in _NONZERO:
            need = "positive"
        for each in read:
            ask(each, need)

    for value in values.values():
        if isinstance(value, relax.Call) and value.op.name in _RISKS:
            operand, need = _RISKS[value.op.name]
            for var in variables_of(value.args[operand]):
                ask(var, need)
    return needs


def pairs(rule: RewriteRule, samples: int = SAMPLES, seed: int = 0) -> Iterator[Pair]:
    """Samples of the rule in floats, rewritten where the rule matches. RewriteError where a sample is not matched or
    cannot be rewritten."""
    floats = (sample for sample in Sampler(rule, seed).samples(_ATTEMPTS) if sample.dtype == FLOAT)
    for sample in islice(floats, samples):
        mod = tvm.IRModule({"main": instance_function(rule, sample.instance, sample.dtype)})
        state = GraphState.from_module(mod, RuleSet((rule,), LANES))
        sites = state.sites[rule.name]
        if not sites:
            raise RewriteError(f"rule {rule.name}: is not matched in its own instance {sample}")
        after = state.apply(RewriteAction(rule.name, sites[0]))
        yield Pair(sample, state.mod["main"], after.mod["main"])


def outputs(
    functions: Sequence[relax.Function], inputs: Sequence[Sequence[np.ndarray]], target: tvm.target.Target
) -> list[list[np.ndarray]]:
    """Each function's outputs on its arguments: lowered as for a build, but not scheduled, and compiled as one module,
    so that each distinct operator is built once."""
    copies = [copy_with_new_vars(function) for function in functions]
    params = [param for function in copies for param in function.params]
    block = relax.DataflowBlock([b for function in copies for b in function.body.blocks[0].bindings])
    results = relax.Tuple([function.body.body for function in copies])
    main = relax.Function(params, relax.SeqExpr([block], results), results.ty, True)
    main = relax.BlockBuilder().normalize(main).with_attrs({"global_symbol": "main", "num_input": len(params)})
    lowered = Lowering(target).lower(tvm.IRModule({"main": main}))
    arguments = [tvm.runtime.tensor(array) for arrays in inputs for array in arrays]
    if lowered.weight_only is not None:  # what rules make of constants alone
        arguments += flatten(_run(lowered.weight_only, target, []))
    found = _run(lowered.mod, target, arguments)
    return [[tensor.numpy() for tensor in flatten(result)] for result in found]


def _run(mod: tvm.IRModule, target: tvm.target.Target, arguments: list[tvm.runtime.Tensor]) -> Any:
    """What `main` gives. Linked, where there is a compiler to do it: what is compiled in place LLVM optimises whatever
    the target says, which takes four times as long for thousands of functions that are called once."""
    executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("default_build"))
    with scratch_folder() as folder:
        path = Path(folder) / "checked.so"
        try:
            link_library(executable, path)
        except CostError:
            machine = relax.VirtualMachine(executable, tvm.cpu())
        else:
            machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        return machine["main"](*arguments)


def _error(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    """Largest difference, as a share of the largest magnitude or of 1: what terms of that size cancel down to is as
    inexact as they are. NaN where one of them is, infinite where shapes or types differ."""
    if [(a.shape, a.dtype) for a in after] != [(b.shape, b.dtype) for b in before]:
        return float("inf")
    shares = [
        float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(b).max(initial=0.0)), 1.0)
        for a, b in zip(after, before, strict=True)
    ]
    return float(np.max(shares))  # Python's own max passes a NaN over that is not its first


def float_check(rules: Iterable[RewriteRule], target: tvm.target.Target, seed: int = 0) -> dict[str, float]:
    """Rule name -> the largest difference on its samples, as a share of the output's magnitude.

    RewriteError for a rule that misses its samples or that is outside its tolerance.
    """
    found = [pair for rule in rules for pair in pairs(rule, seed=seed)]
    rng = np.random.default_rng(seed)
    arguments = [pair.arguments(rng) for pair in found]
    functions = [function for pair in found for function in (pair.before, pair.after)]
    results = outputs(functions, [a for a in arguments for _ in "ba"], target)
    errors: dict[str, float] = {}
    for pair, before, after in zip(found, results[::2], results[1::2], strict=True):
        rule, error = pair.sample.rule, _error(before, after)
        if not error <= pair.tolerance:  # NaN is an error too
            raise RewriteError(f"rule {rule.name}: differs by {error:.1e} when compiled: {pair.sample}")
        errors[rule.name] = max(errors.get(rule.name, 0.0), error)
    return errors
