"""Items are worked on ahead, come out in order, and their errors with them."""

from __future__ import annotations

import threading

import pytest

from kvfactory.lookahead import ahead


def test_results_come_in_order_and_errors_in_their_place():
    def half(n):
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n // 2

    found = list(ahead(half, range(7)))
    assert [x for x in found if not isinstance(x, Exception)] == [0, 1, 2, 3]
    assert [str(x) for x in found if isinstance(x, Exception)] == ["1 is odd", "3 is odd", "5 is odd"]
    assert isinstance(found[1], ValueError) and list(ahead(half, [])) == []


def test_the_next_items_are_begun_before_they_are_asked_for():
    begun = [threading.Event() for _ in range(6)]

    def begin(n):
        begun[n].set()
        return n

    results = ahead(begin, range(6), count=2)
    assert next(results) == 0
    assert begun[1].wait(10) and begun[2].wait(10)
    assert next(results) == 1 and begun[3].wait(10)
    assert not begun[5].is_set()
    results.close()


def test_leaving_early_drops_what_was_not_begun():
    done, begun, gate = [], threading.Event(), threading.Event()

    def work(n):
        if n == 1:
            begun.set()
            gate.wait(10)
        done.append(n)

    results = ahead(work, range(100), count=3)
    next(results)
    assert begun.wait(10)
    threading.Timer(0.2, gate.set).start()  # leaving waits for the item that was begun
    results.close()
    assert done == [0, 1]


def test_an_exit_of_the_process_is_not_swallowed():
    def leave(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(ahead(leave, [1]))
