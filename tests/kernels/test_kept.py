"""What is kept between calls is bounded by its bytes, not by how many layers and lengths a model
has."""

from __future__ import annotations

import threading

from kernels.kept import Kept


def test_what_was_not_asked_for_longest_goes_first() -> None:
    made: list[str] = []

    def make_one(name: str) -> str:
        made.append(name)
        return name

    keep = Kept(make_one, len, room=6)
    for name in ("a", "bb", "ccc", "a", "dd", "a", "ccc", "bb"):
        assert keep(name) == name
    # dd takes the place of bb, which is made again.
    assert made == ["a", "bb", "ccc", "dd", "bb"]
    # More than there is room for stays alone, until something else comes.
    for name in ("eeeeeeee", "eeeeeeee", "a", "a"):
        keep(name)
    assert made[5:] == ["eeeeeeee", "a"]


def test_threads_that_make_the_same_thing_count_it_once() -> None:
    both = threading.Barrier(2)

    def make_one(name: str) -> str:
        if threading.current_thread() is not threading.main_thread():
            both.wait()
        return name

    keep = Kept(make_one, len, room=4)
    threads = [threading.Thread(target=keep, args=("aa",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keep("bb")
    assert keep._held == 4 and len(keep._made) == 2
