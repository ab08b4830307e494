"""HORDE's orders on a page."""

import pytest

from tfdml.report.orders import order_histories, orders_table
from tfdml.report.summary import further_tables

ORDERS = {
    "1": {"recall@1": 0.581, "recall@2": 0.7, "num_queries": 9},
    "2": {"recall@1": 0.559, "recall@2": 0.677},
    "all": {"recall@1": 0.594, "recall@2": 0.71},
}


def test_table_has_a_row_per_order_and_a_column_per_k():
    html = orders_table(ORDERS)
    for text in ("1, the embedding", "order 2", "all, side by side", "Recall@1", "Recall@2", "58.1", "67.7", "59.4"):
        assert text in html
    assert "num_queries" not in html
    assert html in further_tables({"orders": ORDERS})


def test_without_orders_there_is_nothing():
    assert orders_table({}) == ""
    assert further_tables({"recall@1": 0.5}) == ""


def test_histories_are_those_of_the_orders_beyond_the_embedding():
    history = [
        {"epoch": 0, "recall@1": 0.4, "orders": ORDERS},
        {"epoch": 1},
        {"epoch": 2, "recall@1": 0.5, "orders": {**ORDERS, "2": {"recall@1": 0.6}}},
    ]
    found = order_histories(history)
    assert list(found) == ["order 2", "all, side by side"]
    assert [(entry["epoch"], entry["recall@1"]) for entry in found["order 2"]] == [(0, 0.559), (2, 0.6)]


@pytest.mark.parametrize("history", [[], [{"epoch": 3, "orders": ORDERS}], [{"epoch": 1, "orders": {}}] * 2])
def test_one_measurement_is_no_curve(history):
    assert order_histories(history) == {}
