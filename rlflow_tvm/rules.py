"""`python -m rlflow_tvm.rules`: list the substitution rules, prove them, find new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflow_tvm import cli
from rlflow_tvm.errors import RewriteError, UsageError

if TYPE_CHECKING:
    import tvm

    from rlflow_tvm.passes import RewriteRule
    from rlflow_tvm.passes.proofs import Proofs

FileArgument = Annotated[Path | None, typer.Argument(help="A rule file (JSON); by default the catalogue.")]
RuleOption = Annotated[list[str] | None, typer.Option("--rule", help="Only the rule of this name; may be repeated.")]


def _read(file: Path | None) -> tuple[tuple[RewriteRule, ...], Proofs]:
    """The rules of `file`, or the catalogue, with the recorded proofs."""
    from rlflow_tvm.passes import CATALOGUE
    from rlflow_tvm.passes.proofs import catalogue_proofs, read_rule_file

    return (CATALOGUE, catalogue_proofs()) if file is None else read_rule_file(file)


@cli.reports_errors
def list_rules(
    file: FileArgument = None,
    family: Annotated[
        str | None, typer.Option(help="Only the rules of this family, or of the catalogue's file of this name.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Count each rule's sites in this ONNX file, with shapes as FILE@NAME=1,3,224,224, or zoo:NAME; may "
            "be repeated."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Whose vector width sites are counted for: llvm or JSON.")] = "llvm",
    json: Annotated[Path | None, typer.Option(help="Write all of it to this JSON file.")] = None,
) -> None:
    """Each rule's name, family, equation, conditions and proof; with --model, where it fires."""
    cli.check_writable(json, inputs=[file, *_model_files(model)])
    from rlflow_tvm.passes.proofs import recorded_proof
    from rlflow_tvm.passes.rules import FAMILIES

    everything, proofs = _read(file)
    files = FAMILIES if file is None else {}
    rules = tuple(rule for rule in everything if family in (None, rule.family) or rule in files.get(family or "", ()))
    if not rules and family is not None:
        families = sorted({rule.family for rule in everything}.union(files))
        raise UsageError(f"--family {family}: no such family; there are {', '.join(families)}")
    sites = {name: _sites(_imported(name), rules, _lanes(target)) for name in model or ()}
    rows = []
    for rule in rules:
        told = str(recorded_proof(rule, proofs) or "none")
        fires = {name: counts[rule.name] for name, counts in sites.items()}
        rows.append({**rule.to_json(), "proof": told, "sites": fires})
        print(f"{rule.name} [{rule.family}]\n  {rule}\n  proof: {told}")
        if sites:
            print("  sites: " + ", ".join(f"{name} {count}" for name, count in fires.items()))
    number = len({rule.family for rule in rules})
    print(f"{len(rows)} rule{'s' * (len(rows) != 1)} in {number} famil{'y' if number == 1 else 'ies'}")
    cli.write_json(json, rows)


def _model_files(models: list[str] | None) -> list[Path]:
    from rlflow_tvm.frontend import split_shapes

    return [Path(split_shapes(name)[0]) for name in models or () if not name.startswith(cli.ZOO_PREFIX)]


def _imported(model: str) -> tvm.IRModule:
    from rlflow_tvm.frontend import import_models, split_shapes

    return import_models({model: cli.model_path(split_shapes(model)[0])}, {})[model]


def _lanes(target: str) -> int:
    from rlflow_tvm.kernels import vector_lanes

    return vector_lanes(cli.parse_target(target))


def _sites(mod: tvm.IRModule, rules: tuple[RewriteRule, ...], lanes: int) -> Counter[str]:
    from rlflow_tvm.passes import GraphState, RuleSet

    state = GraphState.from_module(mod, RuleSet(rules, lanes))
    return Counter({rule.name: len(state.sites[rule.name]) for rule in rules})


@cli.reports_errors
def verify(
    file: FileArgument = None,
    rule: RuleOption = None,
    instances: Annotated[int, typer.Option(min=12, help="How many samples a rule is evaluated on.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples and their values.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to prove in.")] = 2,
    compiled: Annotated[
        bool, typer.Option(help="Then compile samples before and after the rewrite, and compare in floats.")
    ] = True,
    record: Annotated[bool, typer.Option(help="Write the proofs down: in FILE, or beside the catalogue.")] = False,
) -> None:
    """Prove rules, all or those of FILE; the first that fails is told with a counterexample, and the exit code is 1."""
    from rlflow_tvm.passes import proofs as recorded
    from rlflow_tvm.passes.verify import Proof, verify_all

    if record and rule:
        raise UsageError("--record and --rule: all proofs are recorded together; leave --rule out")
    everything, _ = _read(file)
    if not everything:
        raise RewriteError(f"{file}: there is no rule in it to prove; give a file that holds one")
    path = recorded.catalogue_path() if file is None else file
    if record:
        cli.check_writable(path)
    unknown = set(rule or ()) - {known.name for known in everything}
    if unknown:
        raise UsageError(f"--rule {min(unknown)}: there is no such rule; `rules list` names them")
    rules = tuple(known for known in everything if not rule or known.name in rule)
    proofs = {}
    with cli.progress_bar("proving") as bar:
        for done, (proved, outcome) in enumerate(verify_all(rules, instances, seed, jobs), start=1):
            if not isinstance(outcome, Proof):
                raise RewriteError(f"not proved: {outcome}")
            proofs[proved.name] = recorded.record(proved, outcome)
            bar(done, len(rules), proved.name)
    count = sum(sum(proof["instances"].values()) for proof in proofs.values())
    print(f"{len(rules)} rules proved on {count} instances")
    if compiled:
        from rlflow_tvm.float_check import float_check

        errors = float_check(rules, cli.parse_target('{"kind": "llvm", "num-cores": 2, "opt-level": 0}'), seed)
        print(f"{len(errors)} rules checked compiled: differences up to {max(errors.values(), default=0.0):.1e}")
    if record:
        cli.write_json(path, proofs if file is None else recorded.with_proofs(file, proofs))
        print(f"recorded in {path}")


OPERATORS = "matmul,add,multiply,relu,concat,split,permute_dims,reshape,conv2d,sum"


@cli.reports_errors
def generate(
    out: Annotated[Path, typer.Option(help="The rule file (JSON) to write; FILE.journal beside it until it is done.")],
    ops: Annotated[str, typer.Option(help="The operators of the rules, with commas between them.")] = OPERATORS,
    depth: Annotated[int, typer.Option(min=1, max=3, help="Operators of a side, at most.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the values that terms are compared on.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to prove in.")] = 2,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Rank by the sites in this ONNX file, with shapes as FILE@NAME=1,3,224,224, or zoo:NAME; may be "
            "repeated. Default: zoo:demo."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Whose vector width sites are counted for: llvm or JSON.")] = "llvm",
) -> None:
    """Find rules: enumerate terms, pair equal ones, generalise and prove them; `list` and `verify` take the file.

    The same search gives the same rules. One that was stopped goes on where it was.
    """
    journal = out.with_name(f"{out.name}.journal")
    cli.check_writable(out, journal, inputs=_model_files(model))
    from rlflow_tvm.passes.proofs import record, rules_as_json
    from rlflow_tvm.passes.synthesis.search import find_rules
    from rlflow_tvm.passes.synthesis.world import KNOWN

    operators = tuple(dict.fromkeys(name.strip() for name in ops.split(",") if name.strip()))
    unknown = [name for name in operators if name not in KNOWN]
    if unknown or not operators:
        raise UsageError(f"--ops {','.join(unknown)}: rules are found over {', '.join(KNOWN)}")
    lanes, modules = _lanes(target), [_imported(name) for name in model or ("zoo:demo",)]
    with cli.progress_bar("enumerating") as bar:
        found, counts = find_rules(operators, depth, seed, jobs, journal, bar)
    print(counts)
    rules = tuple(one.rule for one in found)
    sites = Counter[str]()
    for mod in modules:
        sites += _sites(mod, rules, lanes)
    ranked = sorted(found, key=lambda one: -sites[one.rule.name])
    proofs = {one.rule.name: record(one.rule, one.proof) for one in ranked}
    data = rules_as_json([one.rule for one in ranked], proofs)
    for entry, one in zip(data["rules"], ranked, strict=True):
        entry.update(sites=sites[one.rule.name], catalogue=", ".join(one.catalogue))
    data["search"] = {"operators": list(operators), "depth": depth, "seed": seed, **vars(counts)}
    cli.write_json(out, data)
    journal.unlink(missing_ok=True)
    new = [one.rule for one in ranked if not one.catalogue]
    print(f"{len(ranked) - len(new)} do what one of the catalogue does, {len(new)} are new; most sites:")
    for rule in new[:10]:
        print(f"  {sites[rule.name]} {rule}")
    print(f"written to {out}")


COMMANDS: dict[str, Callable[..., None]] = {"list": list_rules, "verify": verify, "generate": generate}

if __name__ == "__main__":
    cli.run_group(__doc__ or "", COMMANDS)
