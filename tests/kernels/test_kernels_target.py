"""The target that stands for this machine: what its processor's name promises and the system does not tell of."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm.target import Target
from tvm.target.codegen import llvm_cpu_has_features

from rlflow_tvm.errors import UsageError
from rlflow_tvm.kernels import as_target, default_target, target, vector_lanes

ALL = "fpu sse sse2 ssse3 sse4_1 sse4_2 avx f16c avx2 fma bmi1 bmi2"


@pytest.fixture(autouse=True)
def a_virtual_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of a processor with AVX-512, whatever runs here; what is hidden of it stands in a file."""
    monkeypatch.setattr(target, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(target, "llvm_get_system_cpu", lambda: "skylake-avx512")
    target._missing.cache_clear()
    yield
    target._missing.cache_clear()


@pytest.mark.skipif("sse2" not in str(Target({"kind": "llvm", "mcpu": "x86-64"})) and not llvm_cpu_has_features(
    "sse2", Target({"kind": "llvm", "mcpu": "x86-64"})), reason="flags are told so on x86 alone")  # fmt: skip
@pytest.mark.parametrize(
    ("flags", "hidden", "lanes"),
    [
        (f"{ALL} avx512f avx512cd avx512bw avx512dq avx512vl", set(), 16),
        (ALL, {"-avx512f", "-avx512cd", "-avx512bw", "-avx512dq", "-avx512vl"}, 8),
        ("fpu sse sse2 avx", {"-avx2", "-fma", "-f16c", "-bmi2"}, 8),
        ("fpu sse sse2", {"-avx", "-avx2"}, 4),
    ],
)
def test_what_a_virtual_machine_hides_is_not_used(flags: str, hidden: set[str], lanes: int) -> None:
    target._CPUINFO.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\nflags\t\t: other\n")
    found = default_target()
    told = {str(each) for each in found.attrs.get("mattr") or ()}
    assert told >= hidden
    assert bool(told) == bool(hidden)
    assert vector_lanes(found) == lanes
    for feature in ("avx", "avx2", "fma", "avx512f"):
        assert llvm_cpu_has_features(feature, found) == (feature in flags.split())


@pytest.mark.parametrize("text", [None, "processor\t: 0\nFeatures\t: fp asimd\n"])
def test_where_nothing_is_told_the_name_stands_for_all(text: str | None) -> None:
    if text is not None:
        target._CPUINFO.write_text(text)
    assert "mattr" not in default_target().attrs


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        ({"mcpu": "native", "num-cores": 3}, 3),
        ({"mcpu": "native"}, None),
        ({"keys": ["cpu"], "mcpu": "native", "num-cores": 5}, 5),
    ],
)
def test_native_is_this_machines_processor(told: dict[str, object], cores: int | None) -> None:
    """Of "native" TVM makes any processor of its kind, and says so in its log alone."""
    here = default_target()
    for given in ({"kind": "llvm", **told}, Target({"kind": "llvm", **told})):
        found = as_target(given)
        assert found.attrs["mcpu"] == "skylake-avx512"
        assert list(found.attrs.get("mattr") or ()) == list(here.attrs.get("mattr") or ())
        assert int(found.attrs["num-cores"]) == (int(here.attrs["num-cores"]) if cores is None else cores)


def test_instructions_may_be_added_to_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a virtual machine hides is not let in by that, but where it is told by name."""
    monkeypatch.setattr(
        target, "default_target", lambda: Target({"kind": "llvm", "mcpu": "skylake-avx512", "mattr": ["-avx512vl"]})
    )
    for added in (["+gfni"], ["+gfni", "+avx512vl"]):
        found = as_target({"kind": "llvm", "mcpu": "native", "mattr": added})
        assert list(found.attrs["mattr"]) == ["-avx512vl", *added]


def test_a_target_without_a_processor_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    target._tell_of_any_processor.cache_clear()
    for _ in range(2):
        assert vector_lanes(as_target({"kind": "llvm", "num-cores": 3})) == 4
    assert caplog.text.count("names no processor: code is made for any of its kind") == 1
    for named in ("llvm", {"kind": "llvm", "mcpu": "generic"}, {"kind": "llvm", "opt-level": 0}):
        as_target(named)
    assert caplog.text.count("names no processor") == 1


@pytest.mark.parametrize("told", [{"mcpu": "generic"}, {"mcpu": "haswell"}, {"opt-level": 0}, {"mattr": ["+avx2"]}])
def test_a_target_that_says_more_stays_as_it_is(told: dict[str, object]) -> None:
    given = Target({"kind": "llvm", **told})
    assert str(as_target(given)) == str(given)


def test_native_is_no_processor_of_another_machine() -> None:
    with pytest.raises(UsageError, match="native is this machine's processor: name that of"):
        as_target({"kind": "llvm", "mcpu": "native", "mtriple": "aarch64-linux-gnu"})
