"""Which einsums are imported as matrix products, and that all give ONNX Runtime's numbers."""

from __future__ import annotations

import pytest
from onnx import helper
from small_weights import drawn

_PRODUCTS = {
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "b h q k, b k h d -> b q h d": ((2, 3, 4, 5), (2, 5, 3, 6)),
    "bsd,dhk->bshk": ((2, 3, 4), (4, 5, 6)),
    "bds,hdk->bhks": ((2, 4, 3), (5, 4, 6)),
    "kj,ik->ij": ((4, 5), (3, 4)),
    "abij,bjik->bka": ((2, 3, 4, 5), (3, 5, 4, 6)),
    "ijbxy,yjxk->bik": ((2, 3, 4, 5, 6), (6, 3, 5, 2)),
}
_LOOPS = {
    "i,i->": ((5,), (5,)),
    "bd,bd->b": ((3, 4), (3, 4)),
    "abij,abjik->bka": ((2, 3, 4, 5), (2, 3, 5, 4, 6)),
    "i,j->ij": ((3,), (4,)),
    "ij,ij->ij": ((3, 4), (3, 4)),
    "bij,jk->ik": ((2, 3, 4), (4, 5)),
    "ii,ij->ij": ((3, 3), (3, 4)),
    "ikk,kkj->ij": ((2, 3, 3), (3, 3, 4)),
    "...ij,...jk->...ik": ((2, 3, 4), (2, 4, 5)),
    "ij,jk": ((3, 4), (4, 5)),
}


@pytest.mark.parametrize("equation", [*_PRODUCTS, *_LOOPS])
def test_an_einsum_that_is_a_product_is_imported_as_one(equation: str, make_model, assert_imports_right) -> None:
    a, b = {**_PRODUCTS, **_LOOPS}[equation]
    nodes = [helper.make_node("Einsum", ["a", "b"], ["y"], equation=equation)]
    for model in (
        make_model(nodes, {"a": a, "b": b}, ["y"]),
        make_model(nodes, {"a": a}, ["y"], {"b": drawn(*b)}),
    ):
        text = assert_imports_right(model).script()
        assert ("R.matmul" in text, "R.einsum" in text) == (equation in _PRODUCTS, equation in _LOOPS)


def test_an_einsum_of_integers_is_none(make_model, assert_imports_right) -> None:
    nodes = [helper.make_node("Einsum", ["a", "b"], ["y"], equation="ij,jk->ik")]
    model = make_model(nodes, {"a": (3, 4), "b": (4, 5)}, ["y"], dtypes={"a": "int32", "b": "int32"}, out_dtype="int32")
    assert "R.einsum" in assert_imports_right(model).script()
